"""Parts of `benchmarks/peers.py`.

prompts.json        what is asked, by task
environment.py      the other systems' packages and copies of the models
convert.py          writes those copies
serve.py            a system as a process; system_*.py are the systems
workers.py          the driver's end of such a process
report.py           rows, summary and tables
"""
