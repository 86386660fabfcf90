"""Ids to text, token by token: against decoding everything at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.models.checkpoints import HuggingFaceTokenizer
from outrider.models.toy import ByteTokenizer
from outrider.text import TextBuilder, Tokenizer

BROKEN = "\ufffd"
BYTES = ByteTokenizer()

TEXTS = [
    "plain words, nothing else.",
    "naïve café \u2013 Übergröße",
    "日本語のテキストを少しだけ",
    "🙂🙃 and 👩\u200d🚀 and 🇫🇷",
    "mixed: ä🙂b本c\n\n\tdef f(x):\n    return x",
    "  spaces  around  ",
    "a real replacement character: \ufffd, and one at the end \ufffd",
]


@pytest.fixture(scope="module")
def pieces() -> HuggingFaceTokenizer:
    """A small byte-level BPE like GPT-2's: some tokens hold a space and half a character."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    # Many emoji and kanji behind spaces: the pairs merge into " " + first bytes.
    tokenizer.train_from_iterator([*TEXTS, *(" 🙂 🙃 🙁 日 本 語" for _ in range(5))], trainer)
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    )


@pytest.fixture(scope="module")
def words() -> HuggingFaceTokenizer:
    """A tokenizer like Llama 2's, whose decoder takes one space off the front."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁foo": 2, "▁bar": 3, "▁": 4}
    vocabulary |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = RustTokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    )


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest, pieces: HuggingFaceTokenizer) -> Tokenizer:
    return BYTES if request.param == "bytes" else pieces


def shown(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str] = (), *, every: int = 1
) -> list[str]:
    """What a stream shows that takes after `every` tokens and at the end."""
    builder = TextBuilder(tokenizer, stops)
    parts = []
    for i, token in enumerate(ids):
        if builder.add(token):
            break
        if (i + 1) % every == 0:
            parts.append(builder.take())
    parts.append(builder.finish())
    assert "".join(parts) == builder.text
    return parts


def cut(text: str, stops: Sequence[str], start: int = 0) -> str:
    """`text` before the stop string that is complete first, of those that begin at `start`."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return text[: min(found)[1]] if found else text


# The whole text, in every grouping


@pytest.mark.parametrize("every", range(1, 9))
@pytest.mark.parametrize("text", TEXTS)
def test_the_parts_of_a_stream_are_the_whole_text(
    text: str, every: int, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(shown(tokenizer, ids, every=every)) == text


@pytest.mark.parametrize("text", [text for text in TEXTS if BROKEN not in text])
def test_no_half_character_is_ever_shown(text: str, tokenizer: Tokenizer) -> None:
    parts = shown(tokenizer, tokenizer.encode(text))
    assert BROKEN not in "".join(parts)
    # Every character that is complete is shown at once: what is held back is less than one.
    builder = TextBuilder(tokenizer)
    for i, token in enumerate(ids := tokenizer.encode(text)):
        builder.add(token)
        builder.take()
        assert not builder.text or text.startswith(builder.text)
        if not tokenizer.decode(ids[: i + 1]).endswith(BROKEN):
            assert builder.text == tokenizer.decode(ids[: i + 1])


def test_text_is_shown_as_soon_as_its_token_is_there() -> None:
    builder = TextBuilder(BYTES, ["zz"])
    for character in "abc def":
        builder.add(ord(character))
        assert builder.take() == character


def test_a_character_is_shown_with_its_last_byte() -> None:
    builder = TextBuilder(BYTES)
    taken = []
    for byte in "a🙂".encode():
        builder.add(byte)
        taken.append(builder.take())
    assert taken == ["a", "", "", "", "🙂"]


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    end = 256 if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocabulary().index("<|end|>")
    ids = [end, *tokenizer.encode("one"), end, end, *tokenizer.encode(" two"), end]
    assert "".join(shown(tokenizer, ids)) == "one two"


def test_a_space_that_a_decoder_takes_off_the_front_is_kept_inside(
    words: HuggingFaceTokenizer,
) -> None:
    for ids in ([2, 3], [2, 4, 3], [4, 2, 3, 2], [1, 2, 3], [2, *range(5 + 65, 5 + 70), 3]):
        assert "".join(shown(words, ids)) == words.decode(ids)


def test_a_space_after_a_special_token_is_kept(words: HuggingFaceTokenizer) -> None:
    ids = [2, 1, 3]
    assert words.decode(ids) == "foo bar"
    assert "".join(shown(words, ids)) == "foo bar"


def test_a_decoder_may_write_one_sign_for_every_byte_of_an_unfinished_character(
    words: HuggingFaceTokenizer,
) -> None:
    ids = [2, *(5 + byte for byte in "€🙂€".encode()), 3]
    assert words.decode(ids[:2]).endswith(BROKEN)
    assert words.decode(ids[:3]).endswith(BROKEN * 2)
    assert [part for part in shown(words, ids) if part] == ["foo", "€", "🙂", "€", " bar"]


def test_without_a_tokenizer_the_text_is_empty() -> None:
    builder = TextBuilder(None)
    assert [builder.add(token) for token in (1, 2, 3)] == [False] * 3
    assert (builder.take(), builder.finish(), builder.text) == ("", "", "")


# Stop strings


def fed(
    text: str | bytes, stops: Sequence[str], tokenizer: Tokenizer = BYTES
) -> tuple[str, int | None, bool]:
    """(text, index of the token that stopped it, whether it stopped)."""
    ids = list(text) if isinstance(text, bytes) else tokenizer.encode(text)
    builder = TextBuilder(tokenizer, stops)
    stopped_at = next((i for i, token in enumerate(ids) if builder.add(token)), None)
    return builder.take() + builder.finish(), stopped_at, builder.stopped


def test_a_stop_string_ends_the_text_before_it_with_its_last_token() -> None:
    assert fed("one END two", ["END"]) == ("one ", 6, True)


def test_a_stop_string_across_token_borders_is_found(pieces: HuggingFaceTokenizer) -> None:
    text = "mixed: ä🙂b本c and more"
    ids = pieces.encode(text)
    borders = {len(pieces.decode(ids[:i])) for i in range(1, len(ids))}
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            if any(start < border < end for border in borders):
                wanted = cut(text, [stop])
                assert "".join(shown(pieces, ids, [stop])) == wanted


def test_a_stop_string_inside_one_token_is_found(pieces: HuggingFaceTokenizer) -> None:
    token = max(range(len(pieces.vocabulary())), key=lambda i: len(pieces.decode([i]).strip()))
    inside = pieces.decode([token])
    assert len(inside) > 2
    builder = TextBuilder(pieces, [inside[1:-1]])
    assert builder.add(token)
    assert builder.take() == inside[0]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    # "bcd" begins first, "c" is complete first.
    assert fed("abcd", ["bcd", "c"]) == ("ab", 2, True)
    assert fed("abcd", ["c", "bcd"]) == ("ab", 2, True)


def test_of_two_stop_strings_that_end_together_the_longer_one_is_cut() -> None:
    assert fed("abcd", ["bc", "c"]) == ("a", 2, True)
    assert fed("abcd", ["c", "bc"]) == ("a", 2, True)


def test_the_earliest_of_several_stop_strings_in_one_token_wins() -> None:
    class Words(ByteTokenizer):
        """One token is a whole word."""

        def decode(self, ids: Sequence[int]) -> str:
            return "".join("one two three"[4 * (i - 1) :] for i in ids)

    assert Words().decode([1]) == "one two three"
    for stops in (["three", "two"], ["two", "three"], ["two thr", "wo"]):
        builder = TextBuilder(Words(), stops)
        assert builder.add(1)
        assert builder.finish() == "one " + ("t" if "wo" in stops else "")


def test_a_stop_string_early_in_a_long_run_is_found() -> None:
    text = "ab STOP" + "x" * 200
    builder = TextBuilder(BYTES, ["STOP"])
    stopped = [
        i for i, byte in enumerate(text.encode()) if not builder.stopped and builder.add(byte)
    ]
    assert stopped == [6]
    assert builder.take() == "ab "


def test_all_text_before_a_stop_string_is_shown_even_if_it_looks_like_its_beginning() -> None:
    builder = TextBuilder(BYTES, ["ab"])
    assert [builder.add(byte) for byte in b"xaab"] == [False, False, False, True]
    assert builder.take() == "xa"


def test_a_stop_string_at_the_very_beginning_leaves_no_text() -> None:
    assert fed("STOP and go", ["STOP"]) == ("", 3, True)


def test_a_beginning_of_a_stop_string_is_held_and_then_released() -> None:
    builder = TextBuilder(BYTES, ["STOP"])
    taken = []
    for byte in b"aSTOx":
        builder.add(byte)
        taken.append(builder.take())
    assert taken == ["a", "", "", "", "STOx"]


def test_only_the_part_that_can_still_become_a_stop_string_is_held() -> None:
    builder = TextBuilder(BYTES, ["aab"])
    taken = []
    for byte in b"aaaac":
        builder.add(byte)
        taken.append(builder.take())
    assert taken == ["", "", "a", "a", "aac"]


def test_a_stop_string_that_follows_its_own_beginning_is_found() -> None:
    assert fed("xaaaab", ["aab"]) == ("xaa", 5, True)
    assert fed("ababac", ["abac"]) == ("ab", 5, True)


def test_the_longest_beginning_of_any_stop_string_is_held() -> None:
    for stops in (["bc", "abcd"], ["abcd", "bc"]):
        builder = TextBuilder(BYTES, stops)
        for byte in b"xab":
            builder.add(byte)
        assert builder.take() == "x"


def test_held_text_is_flushed_at_the_end() -> None:
    builder = TextBuilder(BYTES, ["STOP"])
    for byte in b"go STO":
        builder.add(byte)
    assert builder.take() == "go "
    assert builder.finish() == "STO"
    assert not builder.stopped
    assert builder.finish() == ""


def test_half_a_character_is_flushed_at_the_end() -> None:
    builder = TextBuilder(BYTES)
    for byte in "ab🙂".encode()[:-1]:
        builder.add(byte)
    assert builder.take() == "ab"
    assert builder.finish() == BROKEN
    assert builder.text == "ab" + BROKEN


def test_text_is_complete_even_if_nothing_was_taken() -> None:
    builder = TextBuilder(BYTES, ["ol"])
    for byte in b"hello":
        builder.add(byte)
    assert builder.text == "hello"
    assert builder.finish() == "hello"


def test_taking_twice_gives_nothing_new() -> None:
    builder = TextBuilder(BYTES)
    builder.add(ord("a"))
    assert [builder.take(), builder.take()] == ["a", ""]


def test_a_stop_string_of_several_bytes_per_character_is_found() -> None:
    assert fed("ein 🙂 dann 🙃 dann", ["🙃"]) == ("ein 🙂 dann ", 17, True)


def test_nothing_may_follow_a_stop() -> None:
    builder = TextBuilder(BYTES, ["a"])
    assert builder.add(ord("a"))
    with pytest.raises(AssertionError):
        builder.add(ord("b"))


def test_there_are_no_stop_strings_by_default() -> None:
    assert fed("anything", ())[1:] == (None, False)
    assert not any(TextBuilder(BYTES).add(byte) for byte in range(128))


@pytest.fixture(scope="module")
def space_and_half(pieces: HuggingFaceTokenizer) -> int:
    """A token that is a space and the first bytes of a character."""
    return next(i for i in range(len(pieces.vocabulary())) if pieces.decode([i]) == " " + BROKEN)


def test_a_stop_string_before_half_a_character_in_one_token_stops_at_that_token(
    pieces: HuggingFaceTokenizer, space_and_half: int
) -> None:
    builder = TextBuilder(pieces, [" "])
    assert not any(builder.add(token) for token in pieces.encode("ab"))
    stopped = builder.add(space_and_half)
    assert stopped


# While stop strings do not count yet


def test_stop_strings_are_ignored_while_they_may_not_stop() -> None:
    builder = TextBuilder(BYTES, ["ab"])
    assert [builder.add(byte, may_stop=False) for byte in b"xabab"] == [False] * 5
    assert builder.take() == "xabab"
    assert [builder.add(byte) for byte in b"yab"] == [False, False, True]
    assert builder.finish() == "y"
    assert builder.text == "xababy"


def test_a_stop_string_that_began_before_it_may_stop_does_not_count() -> None:
    builder = TextBuilder(BYTES, ["abc"])
    for byte in b"ab":
        builder.add(byte, may_stop=False)
    assert builder.take() == "ab"
    assert not builder.add(ord("c"))
    assert builder.take() == "c"


def test_nothing_is_held_for_a_stop_string_while_it_may_not_stop() -> None:
    builder = TextBuilder(BYTES, ["STOP"])
    builder.add(ord("S"), may_stop=False)
    assert builder.take() == "S"


def test_a_token_may_stop_by_default() -> None:
    assert TextBuilder(BYTES, ["a"]).add(ord("a"))


def test_text_held_while_it_may_not_stop_does_not_stop_at_the_end() -> None:
    builder = TextBuilder(BYTES, [BROKEN])
    assert not builder.add(0xFF, may_stop=False)
    assert builder.finish() == BROKEN
    assert not builder.stopped


# Bytes that are no text


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"a\xffb",
        b"\xe2\x82A",
        b"\x80\x80\x80",
        b"\xf0\x9f\x99",
        b"\xc3\xa4\xc3",
        b"\xed\xa0\x80x",
    ],
)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_invalid_bytes_become_what_the_decoder_makes_of_them(raw: bytes, every: int) -> None:
    assert "".join(shown(BYTES, list(raw), every=every)) == raw.decode(errors="replace")


def test_text_goes_on_after_invalid_bytes() -> None:
    builder = TextBuilder(BYTES)
    for byte in b"\xff" * 40 + b"ok":
        builder.add(byte)
    assert builder.take() == BROKEN * 40 + "ok"


class Counting(ByteTokenizer):
    """Counts the ids it decodes."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids)


def decoded_ids(raw: bytes) -> int:
    counting = Counting()
    builder = TextBuilder(counting, ["never"])
    for byte in raw:
        builder.add(byte)
    return counting.num_decoded


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    for raw in (b"x" * 1000, "日".encode() * 333, b"\xffx" * 500):
        assert decoded_ids(raw) <= 16 * len(raw)


@pytest.mark.parametrize("raw", [b"\xff" * 1000, b"\x80" * 1000, b"\xe2\x82" * 500])
def test_a_long_run_of_invalid_bytes_ends_and_comes_out_whole(raw: bytes) -> None:
    builder = TextBuilder(BYTES, ["never", BROKEN + "never"])
    for byte in raw:
        assert not builder.add(byte)
    assert builder.take() + builder.finish() == raw.decode(errors="replace")


# Against the whole text


some_bytes = st.lists(
    st.sampled_from(
        [b"a", b"b", b"\xff", b"\xc3", b"\xa4", b"\xf0\x9f", b"\x99\x82", "本".encode()]
    ),
    max_size=14,
).map(b"".join)
any_bytes = some_bytes | st.binary(max_size=20)
some_stops = st.lists(
    st.text(st.sampled_from("abä🙂本" + BROKEN), min_size=1, max_size=3), max_size=3
)


@settings(deadline=None, max_examples=60)
@given(raw=any_bytes, stops=some_stops, every=st.integers(1, 8))
@example(raw="ä🙂ä".encode(), stops=["🙂ä", "ä🙂"], every=3)
def test_any_bytes_and_stop_strings_give_the_whole_text_cut_once(
    raw: bytes, stops: list[str], every: int
) -> None:
    parts = shown(BYTES, list(raw), stops, every=every)
    assert "".join(parts) == cut(raw.decode(errors="replace"), stops)


@settings(deadline=None, max_examples=60)
@given(raw=any_bytes, stops=some_stops, first=st.integers(0, 8))
def test_stop_strings_count_only_after_the_tokens_that_may_not_stop(
    raw: bytes, stops: list[str], first: int
) -> None:
    # Where those tokens end inside a character, it is not defined whose text that character is.
    head = raw[:first].decode(errors="replace")
    if head.endswith(BROKEN):
        return
    builder = TextBuilder(BYTES, stops)
    for i, byte in enumerate(raw):
        if builder.add(byte, may_stop=i >= first):
            break
    text = builder.take() + builder.finish()
    assert text == cut(raw.decode(errors="replace"), stops, start=len(head))


@settings(deadline=None, max_examples=60)
@given(raw=any_bytes, stops=some_stops)
def test_nothing_shown_is_ever_taken_back(raw: bytes, stops: list[str]) -> None:
    final = cut(raw.decode(errors="replace"), stops)
    builder, taken = TextBuilder(BYTES, stops), ""
    for byte in raw:
        stopped = builder.add(byte)
        taken += builder.take()
        assert final.startswith(taken)
        assert builder.stopped == stopped
        if stopped:
            assert taken == final
            break


@pytest.fixture(scope="module")
def pieces_ids(pieces: HuggingFaceTokenizer) -> Callable[[list[int]], list[int]]:
    size = len(pieces.vocabulary())
    return lambda numbers: [number % size for number in numbers]


@settings(deadline=None, max_examples=60)
@given(
    numbers=st.lists(st.integers(0, 5000), max_size=20), stops=some_stops, every=st.integers(1, 8)
)
def test_any_pieces_and_stop_strings_give_the_whole_text_cut_once(
    numbers: list[int],
    stops: list[str],
    every: int,
    pieces: HuggingFaceTokenizer,
    pieces_ids: Callable[[list[int]], list[int]],
) -> None:
    ids = pieces_ids(numbers)
    stops = [*stops, "e ", "re"]
    assert "".join(shown(pieces, ids, stops, every=every)) == cut(pieces.decode(ids), stops)
