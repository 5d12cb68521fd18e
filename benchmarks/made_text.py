"""Text that is made here, to pretrain a small language model on: passages, and instructions with answers.

Nothing is read from anywhere: words are listed below or put together from pieces of words, sentences from words. What a
model can learn from it: to copy, to choose among options by word or letter, to say yes or no, to find a thing in a
text. Every row follows from the generator it is drawn with.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Anna Ben Clara David Ella Felix Greta Hugo Iris Jonas Karin Leo Mira Noah Olga Paul Rosa Simon Tara Victor Wanda "
    "Yusuf Zoe Martin Nadia Oscar Peter Quentin Ruth Stefan Thomas Ursula Alice Bruno Cecilia Dario Emma Frank Georgia "
    "Henry Ines Jakob Kira Lucas Maria Nico Otto Petra Robert Sara"
)
KINDS: dict[str, list[str]] = {
    "an animal": _words("dog cat horse cow sheep goat duck goose mouse rabbit fox wolf bear deer lion tiger bird fish"),
    "something to eat": _words("bread cheese soup rice apple pear plum carrot onion potato cake honey butter egg"),
    "a colour": _words("red blue green yellow black white brown grey purple pink orange"),
    "a tool": _words("hammer saw knife spoon needle brush ladder rope shovel axe drill wrench broom"),
    "something to wear": _words("coat hat shirt shoe glove scarf dress belt sock jacket boot skirt"),
    "a place": _words("city village garden school church market station harbour kitchen office library museum bridge"),
    "a person's work": _words("doctor teacher farmer baker sailor nurse judge painter driver writer soldier lawyer"),
    "a vehicle": _words("train ship boat bus car truck bicycle plane wagon tram"),
    "something in nature": _words("river mountain lake forest field island valley beach desert cloud storm wind snow"),
    "a thing in a house": _words("table chair lamp door window bed mirror clock shelf carpet cup plate bottle box key"),
    "a number": _words("one two three four five six seven eight nine ten eleven twelve"),
}
THINGS = [*KINDS["a tool"], *KINDS["something to wear"], *KINDS["a thing in a house"], *KINDS["something to eat"]]
PLACES = [*KINDS["a place"], *KINDS["something in nature"]]
QUALITIES = _words(
    "old new small large heavy light broken clean dirty warm cold quiet loud famous strange simple careful young long "
    "short early late good bad happy sad rich poor strong weak open empty full dry wet bright dark"
)
DEEDS = _words(
    "found lost took bought sold carried hid cleaned repaired painted broke brought kept opened moved watched counted "
    "described wanted needed saw used left made showed forgot remembered"
)
WHEN = [
    *("in the morning", "after the meeting", "last year", "before the war", "at night", "for a long time"),
    *("in the end", "without a word", "with great care", "because of the rain", "when the train came"),
    *("as people say", "in his own house", "under the bridge", "on the first day"),
]
_STARTS = _words("con pro re un dis over inter pre sub trans ex im de per com en out fore mis non anti under super")
_ROOTS = _words(
    "duct form port ject tract vis press mit tain cept struct scrib vert ven sist spect pos fer cur lect gress clud "
    "rupt mov sens plic sum tend val ver lib grad man ped cap fin mark land work stand hand light ground water stone "
    "wood side point head line fall back time day play mar bel tor ran lan mer sol dan ber kel win hal gar nor"
)
_ENDS = _words(
    "ing ed er ion s ment al ive or able ness ly y ic ous ure ance ence ity ful less ist ism age ant ent ton ford "
    "land a"
)


class Row(NamedTuple):
    """A text with what kind it is; `instruction` is empty where the answer is a text of its own."""

    kind: str
    instruction: str
    answer: str


def invented(draws: random.Random) -> str:
    """A word that is in no list: pieces of English words, or letters."""
    if draws.random() < 0.15:
        return "".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(2, 7)))
    word = draws.choice(_ROOTS) + draws.choice(_ENDS)
    word = draws.choice(_STARTS) + word if draws.random() < 0.4 else word
    return word.capitalize() if draws.random() < 0.2 else word


def word(draws: random.Random) -> str:
    """Any word, a number now and then."""
    chance = draws.random()
    if chance < 0.45:
        return invented(draws)
    if chance < 0.55:
        return str(draws.randint(0, 2030))
    if chance < 0.65:
        return draws.choice(NAMES)
    return draws.choice(draws.choice([THINGS, PLACES, QUALITIES, DEEDS]))


def sentence(draws: random.Random) -> str:
    """One sentence, with its full stop."""
    thing = draws.choice(THINGS) if draws.random() < 0.8 else invented(draws).lower()
    what = f"the {draws.choice(QUALITIES)} {thing}" if draws.random() < 0.5 else f"the {thing}"
    forms = (
        f"{draws.choice(NAMES)} {draws.choice(DEEDS)} {what}",
        f"{draws.choice(NAMES)} and {draws.choice(NAMES)} {draws.choice(DEEDS)} {what}",
        f"there was a {thing} in the {draws.choice(PLACES)}",
        f"{what} was {draws.choice(QUALITIES)} and {draws.choice(QUALITIES)}",
        f"a {draws.choice(KINDS[_WORK])} from the {draws.choice(PLACES)} {draws.choice(DEEDS)} {what}",
        f"{draws.choice(NAMES)} {invented(draws)} said that {what} was {draws.choice(QUALITIES)}",
    )
    text = draws.choice(forms)
    if draws.random() < 0.4:
        text += f" in the {draws.choice(PLACES)}"
    if draws.random() < 0.4:
        text += f"{',' if draws.random() < 0.3 else ''} {draws.choice(WHEN)}"
    return text[0].upper() + text[1:] + draws.choice("....!?")


_WORK = "a person's work"


def passage(draws: random.Random) -> Row:
    """A few sentences; some come again, so that what was read helps."""
    facts = [sentence(draws) for _ in range(draws.randint(1, 3))]
    return Row("passage", "", " ".join([*facts, *draws.sample(facts, draws.randint(0, len(facts)))]))


# -- instructions ------------------------------------------------------------------------------------------------------


def copying(draws: random.Random) -> Row:
    """A text, to be written again."""
    if draws.random() < 0.5:
        text = " ".join(sentence(draws) for _ in range(1 if draws.random() < 0.7 else draws.randint(2, 5)))
    else:
        glue = ", " if draws.random() < 0.2 else " "
        text = glue.join(word(draws) for _ in range(draws.randint(1, 12 if draws.random() < 0.8 else 40)))
    forms = (
        f"Repeat the following text: {text}",
        f"Copy: {text}",
        f"{text}\n\nWrite the text above again.",
        f'What is written here? "{text}"',
        f"Say this once more.\n{text}",
    )
    return Row("copy", draws.choice(forms), text)


def listed(draws: random.Random, question: str, options: list[str]) -> str:
    """A question and its options, one a line."""
    empty = "\n" if draws.random() < 0.5 else ""
    return f"{question}\n{empty}OPTIONS:\n" + "\n".join(f"- {option}" for option in options)


def asked(draws: random.Random) -> tuple[str, list[str], str]:
    """A question that a text or the words' meaning answers, its options in random order, the answer."""
    form = draws.randrange(4)
    if form == 0:  # what kind of thing a word is
        kind = draws.choice(list(KINDS))
        answer = draws.choice(KINDS[kind])
        others = draws.sample([other for other in KINDS if other != kind], draws.randint(1, 4))
        options = [answer, *(draws.choice(KINDS[other]) for other in others)]
        question = f"Which of these is {kind}?"
    elif form == 1:  # who did it
        who = draws.sample(NAMES, draws.randint(2, 3))
        things = draws.sample(THINGS, len(who))
        deeds = [draws.choice(DEEDS) for _ in who]
        facts = [f"{a} {b} the {c}." for a, b, c in zip(who, deeds, things, strict=True)]
        index = draws.randrange(len(who))
        question, answer, options = f"{' '.join(facts)}\n\nWho {deeds[index]} the {things[index]}?", who[index], who
    elif form == 2:  # which word is in the text
        options = list(dict.fromkeys(invented(draws) for _ in range(draws.randint(2, 6))))
        answer = draws.choice(options)
        words = [word(draws) for _ in range(draws.randint(2, 8))]
        words = [*(one for one in words if one not in options), answer]
        draws.shuffle(words)
        question = f"Which of the options is in this text?\n{' '.join(words)}"
    else:  # what is said of a thing
        things = draws.sample(THINGS, 2)
        options = draws.sample(KINDS["a colour"] if draws.random() < 0.5 else QUALITIES, draws.randint(2, 4))
        index = draws.randrange(2)
        facts = [f"The {thing} was {quality}." for thing, quality in zip(things, options, strict=False)]
        question, answer = f"{' '.join(facts)}\nHow was the {things[index]}?", options[index]
    options = list(options)
    draws.shuffle(options)
    return question, options, answer


def choosing(draws: random.Random) -> Row:
    """The answer is one of the options, word for word."""
    question, options, answer = asked(draws)
    return Row("option", listed(draws, question, options), answer)


def by_letter(draws: random.Random) -> Row:
    """The answer is the option's letter."""
    question, options, answer = asked(draws)
    lines = "\n".join(f"({letter}) {option}" for letter, option in zip("ABCDEF", options, strict=False))
    return Row("letter", f"{question}\n{lines}\nAnswer with the letter.", "ABCDEF"[options.index(answer)])


def yes_or_no(draws: random.Random) -> Row:
    """Whether a word is in a text, whether two texts are the same, whether something was told."""
    form, true = draws.randrange(3), draws.random() < 0.5
    words = list(dict.fromkeys(word(draws) for _ in range(draws.randint(3, 9))))
    if form == 0:
        other = invented(draws)
        one = draws.choice(words) if true or other in words else other
        true = one in words
        question = f"Is the word {one} in this text?\n{' '.join(words)}"
    elif form == 1:
        changed = list(words)
        if not true:
            changed[draws.randrange(len(words))] = invented(draws)
        true = changed == words
        question = f"{' '.join(words)}\n{' '.join(changed)}\nAre the two lines the same?"
    else:
        who, deed, things = draws.sample(NAMES, 2), draws.choice(DEEDS), draws.sample(THINGS, 2)
        facts = " ".join(f"{name} {deed} the {thing}." for name, thing in zip(who, things, strict=True))
        question = f"{facts}\nIs it true that {who[0]} {deed} the {things[0 if true else 1]}?"
    options = ["yes", "no"] if draws.random() < 0.5 else ["no", "yes"]
    return Row("yes-no", listed(draws, question, options), "yes" if true else "no")


def short(draws: random.Random) -> Row:
    """One word of a text, or what comes next."""
    words = [word(draws) for _ in range(draws.randint(2, 8))]
    text = " ".join(words)
    index = draws.randrange(len(words) - 1)
    rows = (
        (f"What is the first word?\n{text}", words[0]),
        (f"What is the last word?\n{text}", words[-1]),
        (f"Go on with the list: {text} {' '.join(words[: index + 1])}", words[index + 1]),
        (f"Which word comes after {words[index]}?\n{text}", words[words.index(words[index]) + 1]),
    )
    return Row("short", *draws.choice(rows))


_SHARES: tuple[tuple[Callable[[random.Random], Row], float], ...] = (
    (passage, 0.12), (copying, 0.3), (choosing, 0.25), (by_letter, 0.08), (yes_or_no, 0.13), (short, 0.12),
)  # fmt: skip


def made(draws: random.Random) -> Row:
    """Any row."""
    makers, shares = zip(*_SHARES, strict=True)
    return Row(*draws.choices(makers, shares)[0](draws))
