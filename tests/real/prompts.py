"""Real prompts of different kinds, short enough to run in a test."""

from __future__ import annotations

_LONG = (
    "The river rises in the hills above the town and runs for ninety miles to the sea. In the "
    "spring it floods the lower meadows, and in the summer it shrinks to a thread between the "
    "stones. The people of the valley have built seven bridges over it. The oldest is made of "
    "stone and has stood for six hundred years; the newest is made of steel and carries the "
    "railway. Every bridge has a keeper, and every keeper has a book in which he writes the height "
    "of the water in the morning and in the evening. "
)

PROMPTS = {
    "chat": "Hi! Can you recommend a good book for a long train ride?",
    "haiku": "Write a haiku about the sea.",
    "advice": "How do I keep my houseplants alive in winter?",
    "fact": "What is the capital of Australia, and why is it not Sydney?",
    "story": "Tell me a very short story about a fox and a lighthouse.",
    "python": "Write a Python function that returns the n-th Fibonacci number.",
    "javascript": "Write a JavaScript function that reverses a string.",
    "sql": "Write an SQL query that counts the orders of each customer.",
    "fix code": "Fix:\ndef add(a, b):\n    retrun a + b\n\nfor i in range(3)\n    print(add(i))",
    "shell": "Explain this command: find . -name '*.py' -exec grep -l TODO {} +",
    "list": "List ten fruits, one per line, each with its colour.",
    "steps": "List the steps to change a bicycle tyre as numbered points.",
    "json": 'Answer with JSON only: {"name": ..., "city": ...} for three invented people.',
    "json edit": 'Set "age" to 31 and repeat: {"name": "Ann", "age": 30, "tags": ["a", "b"]}',
    "table": "Make a markdown table of the four seasons and their months.",
    "german": "Schreibe drei Sätze über den Herbst auf Deutsch.",
    "french": "Traduis en français : The cat sleeps on the warm roof.",
    "spanish": "Escribe una lista de cinco animales en español.",
    "unicode": "Repeat exactly: naïve café “déjà vu” … 東京 🚀 Ελληνικά",
    "maths": "What is 17 times 23? Show every step.",
    "repeat": "Repeat this sentence four times: The lamp turns slowly until the morning.",
    "summary": "Summarise this text in two sentences.\n\n" + _LONG,
    "question": _LONG + "\n\nHow many bridges are there, and what is the oldest made of?",
    "edit": "Repeat this text and replace every 'river' by 'stream'.\n\n" + _LONG,
}
