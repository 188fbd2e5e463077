"""Which tokens of a chat are supervised: the oracle decodes them and compares with the answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from data.masks import chat_row, render_chat
from models.errors import UserError
from models.tiny import byte_tokenizer

END = "<|im_end|>"
TWO_TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second answer"},
]
# The same ChatML text, marked in the ways that published templates mark it (or get it wrong).
HEADER = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
MARKED = {
    "answer_and_end": HEADER + "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "answer_only": HEADER + "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
    "with_newline": HEADER + "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}",
    "with_header": "{% generation %}" + HEADER + "{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}",
    "empty": "{% generation %}{% endgeneration %}" + HEADER + "{{ message['content'] + '<|im_end|>\\n' }}",
}


def with_template(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def each(assistant: str, other: str) -> str:
    return (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        + assistant
        + "{% else %}"
        + other
        + "{% endif %}{% endfor %}"
    )


PLAIN = HEADER + "{{ message['content'] + '<|im_end|>\\n' }}"


def supervised(tokenizer, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of every run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [tokenizer.decode(ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2])]


def runs(tokenizer, messages, finish_reason=None) -> list[str]:
    ids, mask = chat_row(messages, tokenizer, finish_reason)
    assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape
    assert tokenizer.decode(ids) == render_chat(messages, tokenizer)
    return supervised(tokenizer, ids, mask)


def chat(*answers: str, question: str = "q?") -> list[dict]:
    turns = [({"role": "user", "content": question}, {"role": "assistant", "content": a}) for a in answers]
    return [message for pair in turns for message in pair]


def test_two_turns_without_markers(tokenizer):
    assert runs(tokenizer, TWO_TURNS) == [f"first answer{END}", f"second answer{END}"]


@pytest.mark.parametrize("name", MARKED)
def test_markers_and_span_finder_agree(tokenizer, name):
    marked = with_template(each(MARKED[name], PLAIN))
    ids, mask = chat_row(TWO_TURNS, marked)
    plain_ids, plain_mask = chat_row(TWO_TURNS, tokenizer)
    assert np.array_equal(ids, plain_ids) and np.array_equal(mask, plain_mask)


def test_markers_around_the_wrong_turn_are_not_believed():
    marked = with_template(each(PLAIN, MARKED["answer_and_end"]))
    assert runs(marked, TWO_TURNS) == [f"first answer{END}", f"second answer{END}"]


def test_markers_decide_where_they_exist(monkeypatch):
    def never(*args):
        raise AssertionError("the span finder ran")

    monkeypatch.setattr("data.masks._find_answer", never)
    assert runs(with_template(each(MARKED["answer_and_end"], PLAIN)), chat("yes")) == [f"yes{END}"]


@pytest.mark.parametrize(
    "answer",
    [
        "end",
        "i",
        "assistant",
        "user",
        "<|im",
        "q?",
        "a\n\nb ",
        " lead",
        "naïve 東京 🙂",
        "\n",
        "a<|im_end|>a",
        "x" * 3000,
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_answers_that_look_like_the_template(answer, marked):
    tokenizer = with_template(each(MARKED["answer_only"] if marked else PLAIN, PLAIN))
    assert runs(tokenizer, chat(answer, "second")) == [answer + END, f"second{END}"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_any_answers(answers):
    tokenizer = with_template(each(PLAIN, PLAIN))
    assert runs(tokenizer, chat(*answers)) == [answer + END for answer in answers]


def test_cut_off_turn_supervises_no_end(tokenizer):
    assert runs(tokenizer, TWO_TURNS, "length") == [f"first answer{END}", "second answer"]
    assert runs(tokenizer, TWO_TURNS, "stop") == [f"first answer{END}", f"second answer{END}"]
    in_message = [TWO_TURNS[0], TWO_TURNS[1] | {"finish_reason": "length"}, *TWO_TURNS[2:]]
    assert runs(tokenizer, in_message) == ["first answer", f"second answer{END}"]
    # a reason at the top of a row that ends with a question belongs to no answer
    assert runs(tokenizer, TWO_TURNS[:3], "length") == [f"first answer{END}"]


def test_template_that_strips_answers():
    stripped = with_template(each(PLAIN.replace("message['content']", "message['content'] | trim"), PLAIN))
    assert runs(stripped, chat("  spaced \n", "b")) == [f"spaced{END}", f"b{END}"]


def test_template_that_rewrites_history():
    # As Qwen3: reasoning of earlier turns is dropped, the last turn gets an empty block.
    answer = "{% set text = message['content'].split('</think>')[-1] %}{{ '<|im_start|>assistant\\n' }}"
    answer += "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ text + '<|im_end|>\\n' }}"
    tokenizer = with_template(each(answer, PLAIN))
    assert runs(tokenizer, chat("one", "two")) == [f"one{END}", f"two{END}"]
    assert runs(tokenizer, chat("<think>hm</think>one", "two")) == [f"one{END}", f"two{END}"]


def test_template_without_end_of_turn():
    alpaca = with_template(
        each("{{ '### Answer:\\n' + message['content'] + '\\n\\n' }}", "{{ message['content'] + '\\n' }}")
    )
    assert runs(alpaca, chat("one", "two")) == ["one", "two"]
    # A header that is a special token does not end the turn before it.
    headers = with_template("{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] }}{% endfor %}")
    assert runs(headers, chat("one", "two")) == ["one", "two"]


def test_end_of_turn_after_white_space():
    spaced = with_template(each("{{ ' ' + message['content'] + ' <|endoftext|>' }}", "{{ message['content'] }}"))
    assert runs(spaced, chat("one", "two")) == ["one <|endoftext|>", "two <|endoftext|>"]


def test_one_bos_when_template_and_tokenizer_both_write_it():
    tokenizer = with_template("{{ bos_token }}" + each(PLAIN, PLAIN))
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert tokenizer("a")["input_ids"] == [256, 64]
    ids, mask = chat_row(TWO_TURNS, tokenizer)
    assert (ids == 256).sum() == 1 and ids[0] == 256 and not mask[0]
    assert (ids == 258).sum() == 4 and (ids[mask] == 258).sum() == 2


def test_pad_equal_to_end_of_turn_is_still_learned():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert runs(tokenizer, chat("yes")) == [f"yes{END}"]


@pytest.mark.parametrize(
    ("template", "messages", "told"),
    [
        (None, TWO_TURNS, "no chat template"),
        (each(PLAIN, PLAIN), TWO_TURNS[:1], "no assistant turn"),
        (each("", PLAIN), TWO_TURNS, "drops or repeats"),
        (each(PLAIN + PLAIN, PLAIN), TWO_TURNS, "drops or repeats"),
        (each("{{ message['content'] | upper }}", PLAIN), TWO_TURNS, "cannot find an answer"),
        ("{{ raise_exception('roles must alternate') }}", TWO_TURNS, "roles must alternate"),
    ],
)
def test_what_cannot_be_masked_is_an_error(template, messages, told):
    with pytest.raises(UserError, match=told) as caught:
        chat_row(messages, with_template(template))
    assert "\n" not in str(caught.value)
