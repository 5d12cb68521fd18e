"""Conversations as tokens: the assistant's turns alone are trained, up to the turn end, and prompts stay prompts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import processors

from silotune.data.chat_template import ChatTemplate, turn_end_ids
from silotune.data.generation_tokenizer import GenerationTokenizer
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.errors import InputError
from tests.support.chats import CHANGING, CHATML, CLOSED, LLAMA2, MARKED, NO_SYSTEM, PLAIN, THINKING, chat_tokenizer

TASK = Task("a", (), kind="generation")
TWO = (("system", "Be kind."), ("user", "the soup?"), ("assistant", "It was warm."), ("user", "and now"))


def encode(template, turns=TWO, answer="cold.", last_only=False, room=200, max_length=400, **options):
    tokenizer = chat_tokenizer(template)
    return tokenizer, encoded_with(tokenizer, turns, answer, last_only, room, max_length, **options)


def encoded_with(tokenizer, turns, answer, last_only=False, room=200, max_length=400, **options):
    """Return a conversation's tokens, which of them are trained, and how many are before the last answer."""
    template = ChatTemplate(tokenizer, None, options)
    tokenize = GenerationTokenizer(tokenizer, template, max_length, room, last_only=last_only)
    rows = tokenize(TASK, [Row((turns[-1][1], ""), 0, answer, turns=tuple(turns))])
    ids, reads = rows.ids[0], rows.reads[0]
    assert rows.targets[0] == [ids[place + 1] for place in reads]
    trained = [place - 1 in reads for place in range(len(ids))]
    return SimpleNamespace(ids=ids, trained=trained, prompt=rows.prompts[0])


def trained_pieces(tokenizer, encoded):
    """Return the stretches of trained tokens as text."""
    pieces, current = [], []
    for token, flag in zip([*encoded.ids, 0], [*encoded.trained, False], strict=True):
        if flag:
            current.append(token)
        elif current:
            pieces.append(tokenizer.decode(current))
            current = []
    return pieces


@pytest.mark.parametrize("template", [CHATML, MARKED, CLOSED])
def test_the_assistants_turns_are_trained_with_their_turn_end(template):
    tokenizer, encoded = encode(template)
    assert trained_pieces(tokenizer, encoded) == ["It was warm.<|im_end|>", "cold.<|im_end|>"]
    assert encoded.ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("template", [CHATML, MARKED, CLOSED, PLAIN, LLAMA2])
def test_the_tokens_before_the_answer_are_those_of_the_prompt_alone(template):
    turns = TWO[1:]
    tokenizer, encoded = encode(template, turns)
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert encoded.ids[: encoded.prompt] == prompt
    assert not any(encoded.trained[encoded.prompt - 1 : encoded.prompt])
    assert encoded.trained[encoded.prompt]


def test_with_last_the_earlier_answers_are_only_read():
    for template in (CHATML, MARKED):
        tokenizer, encoded = encode(template, last_only=True)
        assert trained_pieces(tokenizer, encoded) == ["cold.<|im_end|>"]


def test_the_header_that_a_template_without_prompt_writes_is_read_and_not_trained():
    """ChatML, and roles in plain words, that ignore `add_generation_prompt`."""
    for template, header in ((CHATML, "<|im_start|>assistant\n"), (PLAIN, "assistant: ")):
        without = template[: template.index("{% if add_generation_prompt %}")]
        tokenizer, encoded = encode(without)
        _, expected = encode(template)
        assert encoded == expected
        assert tokenizer.decode(encoded.ids[: encoded.prompt]).endswith(header)
        assert ChatTemplate(tokenizer).prompt(TWO[:2]) == ChatTemplate(chat_tokenizer(template)).prompt(TWO[:2])


@pytest.mark.parametrize("template", [PLAIN, LLAMA2])
def test_a_tokenizer_whose_offsets_leave_out_spaces_trains_the_same_tokens(template):
    """Llama 3's and Pythia's do: a token of one space alone then seems to be where the answer begins."""
    for answer in ("cold.", "cold.  "):
        tokenizer = chat_tokenizer(template)
        whole = encoded_with(tokenizer, TWO[1:], answer)
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        trimmed = encoded_with(tokenizer, TWO[1:], answer)
        assert trimmed == whole
        assert not trimmed.trained[trimmed.prompt - 1]


@pytest.mark.parametrize(
    "call", ["strftime_now('%d %b %Y')", 'strftime_now( "%d %b %Y" ) | trim', "strftime_now('%d ' ~ '%b %Y')"]
)
def test_a_template_that_asks_for_the_date_writes_the_same_every_day(call):
    today = f"{{% set today = {call} if strftime_now is defined else 'never' %}}Today is {{{{ today }}}}.\n{CHATML}"
    for template in (today, today.replace(CHATML, MARKED)):
        tokenizer, encoded = encode(template)
        assert tokenizer.decode(encoded.ids).startswith("Today is 26 Jul 2024.")
        assert ChatTemplate(tokenizer).prompt(TWO).startswith("Today is 26 Jul 2024.")


def test_a_template_without_turn_end_gets_the_tokenizers_end():
    tokenizer, encoded = encode(PLAIN, TWO[:2])
    assert trained_pieces(tokenizer, encoded) == ["cold.</s>"]
    assert turn_end_ids(tokenizer) == ()


def test_the_turn_end_may_be_the_tokenizers_end():
    tokenizer, encoded = encode(LLAMA2, TWO[1:])
    assert trained_pieces(tokenizer, encoded) == [" It was warm. </s>", " cold. </s>"]
    assert turn_end_ids(tokenizer) == (tokenizer.eos_token_id,)
    assert turn_end_ids(chat_tokenizer()) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_the_template_reads_its_options():
    tokenizer, encoded = encode(THINKING, TWO[:2])
    assert trained_pieces(tokenizer, encoded) == ["<think>\n\n</think>\n\ncold.<|im_end|>"]
    tokenizer, encoded = encode(THINKING, TWO[:2], enable_thinking=False)
    assert trained_pieces(tokenizer, encoded) == ["cold.<|im_end|>"]


def test_a_turn_that_changes_later_is_refused_unless_only_the_last_is_trained():
    with pytest.raises(InputError, match=r"turn 3 of a conversation differently.*head\.train_on=last"):
        encode(THINKING)
    tokenizer, encoded = encode(THINKING, last_only=True)
    assert trained_pieces(tokenizer, encoded) == ["<think>\n\n</think>\n\ncold.<|im_end|>"]


def test_a_greeting_of_the_assistant_is_only_read():
    tokenizer, encoded = encode(CHATML, (("assistant", "Hello."), ("user", "the soup?")), "warm.")
    assert tokenizer.decode(encoded.ids).startswith("<|im_start|>assistant\nHello.<|im_end|>")
    assert trained_pieces(tokenizer, encoded) == ["warm.<|im_end|>"]


def test_templates_that_cannot_be_used_are_refused():
    with pytest.raises(InputError, match=r"refuses turns of system, .*System role not supported"):
        encode(NO_SYSTEM)
    with pytest.raises(InputError, match="a prompt and the answered conversation differently"):
        encode(CHANGING)
    with pytest.raises(InputError, match="needs a tokenizer with a chat template"):
        ChatTemplate(chat_tokenizer(None))
    two = chat_tokenizer({"default": CHATML, "rag": PLAIN})
    assert ChatTemplate(two, "rag").text(TWO[:1]) == "system: Be kind.\n"
    with pytest.raises(InputError, match=r"head\.chat_template.*'rags'.*default, rag"):
        ChatTemplate(two, "rags")


SYSTEM_NEEDED = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system turn first') }}{% endif %}" + CHATML
)
PARTS = CHATML.replace("{{ m['content'] }}", "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}")
NO_REASONING = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")


def test_a_template_that_needs_a_system_turn_is_asked_with_one():
    tokenizer, encoded = encode(SYSTEM_NEEDED)
    assert trained_pieces(tokenizer, encoded) == ["It was warm.<|im_end|>", "cold.<|im_end|>"]
    assert turn_end_ids(tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    without = SYSTEM_NEEDED[: SYSTEM_NEEDED.index("{% if add_generation_prompt %}")]
    assert encode(without)[1] == encoded
    with pytest.raises(InputError, match=r"refuses turns of user \(a system turn first\)"):
        encode(SYSTEM_NEEDED, TWO[1:2])


@pytest.mark.parametrize(
    ("template", "answer", "turn"),
    [
        (PARTS, "cold.", 3),
        (NO_REASONING, "<think>hm</think>cold.", 5),
        (MARKED.replace("m['content']", "m['content'].split('</think>')[-1]"), "<think>hm</think>cold.", 5),
    ],
)
def test_a_template_that_leaves_out_an_answer_is_refused(template, answer, turn):
    with pytest.raises(InputError) as refused:
        encode(template, answer=answer)
    assert str(refused.value).startswith(
        f"row 1: head.template: the chat template 'default' leaves out the answer in turn {turn} of a conversation"
    )
    tokenizer = chat_tokenizer(template)
    rows = [Row(("hi", ""), 0, "cold." * (number == 1), turns=TWO[1:2]) for number in range(2)]
    tokenize = GenerationTokenizer(tokenizer, ChatTemplate(tokenizer), 200, 100)
    if template == PARTS:
        with pytest.raises(InputError, match=r"^row 2: head\.template"):
            tokenize(TASK, rows)
    else:
        assert len(tokenize(TASK, rows)) == 2


def test_white_space_around_an_answer_is_the_templates_affair():
    tokenizer, encoded = encode(CHATML.replace("m['content'] }}", "m['content'] | trim }}"), answer=" cold.\n")
    assert trained_pieces(tokenizer, encoded)[-1] == "cold.<|im_end|>"


def test_a_boundary_that_the_tokenizer_would_merge_is_kept():
    template = CHATML.replace("assistant\n{% endif %}", "assistant\nth{% endif %}").replace(
        "{{ m['content'] }}", "{{ 'th' if m['role'] == 'assistant' }}{{ m['content'] }}"
    )
    tokenizer, encoded = encode(template, TWO[:2], "e soup")
    prompt = ChatTemplate(tokenizer).prompt(TWO[:2])
    assert encoded.ids[: encoded.prompt] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert trained_pieces(tokenizer, encoded) == ["e soup<|im_end|>"]


def test_long_conversations_lose_the_oldest_turns_and_keep_system_and_answer():
    turns = (TWO[0], *(turn for number in range(9) for turn in (("user", f"q{number}"), ("assistant", "fine"))), TWO[3])
    tokenizer, encoded = encode(CHATML, turns, room=60, max_length=100)
    text = tokenizer.decode(encoded.ids)
    assert "Be kind." in text
    assert "and now" in text
    assert "q8" in text
    assert "q0" not in text
    assert text.endswith("cold.<|im_end|>")
    assert encoded.prompt <= 60


def test_long_texts_are_cut_before_the_answer_is():
    turns = (("user", "the garden was lovely " * 40),)
    tokenizer, encoded = encode(CHATML, turns, room=40, max_length=60)
    text = tokenizer.decode(encoded.ids)
    assert encoded.prompt <= 40
    assert "<|im_end|>\n<|im_start|>assistant\ncold.<|im_end|>" in text
    tokenizer, encoded = encode(CHATML, turns, "so cold " * 40, room=40, max_length=60)
    assert len(encoded.ids) == 60
    assert encoded.trained[-1]
    assert "<|im_end|>" not in trained_pieces(tokenizer, encoded)[0]


def test_instructions_in_the_chat_template_end_with_its_turn_end():
    tokenizer = chat_tokenizer()
    tokenize = GenerationTokenizer(tokenizer, ChatTemplate(tokenizer), 100, 80)
    rows = tokenize(TASK, [Row(("Do it.", "now"), 0, "Done.")])
    assert tokenizer.decode(rows.targets[0]) == "Done.<|im_end|>"
    assert tokenizer.decode(rows.ids[0][: rows.prompts[0]]).endswith("Do it.\nnow<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("broken", ["{% for tool in tools %}{{ tool }}{% endfor %}", "{{ '' + tools }}"])
def test_a_named_template_for_tools_does_not_end_a_run(broken):
    """All named templates are asked for their end tokens; one that needs tools has none."""
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.chat_template = {"default": CHATML, "tool_use": broken}
    assert turn_end_ids(tokenizer) == turn_end_ids(chat_tokenizer(CHATML))
    with pytest.raises(InputError, match="the chat template refuses turns of user"):
        _ = ChatTemplate(tokenizer, "tool_use").turn_end
