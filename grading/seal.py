"""Question files as learners get them: what to ask in the clear, and every explanation under a key of its own.

Picking an option makes the key that opens that option's explanation, and only that one; a number, an order or a trace
opens its variant's. Sealing keeps answers from being read by accident or found by searching. It is no secret: whoever
reads this file can open everything. What must stay secret is not shipped: the verdicts of graded tests are left out.
"""

import base64
import hashlib
import hmac
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from grading.bank import Bank
from grading.draw import Answer, Drawn, Shown, drawn
from grading.fill import Filled, checked_variant, variants
from grading.question import Question
from grading.verdict import Entry, Part, Verdict, entries, weigh

FORMAT = 1
COST = 2**12  # of scrypt: 4 MiB and about 20 ms for each question, when sealing and at its first answer
TAG = 16  # bytes that show that a blob was opened by its own key
STEP = 64  # blobs of a question are as long as the longest, rounded up to this, so that their size tells nothing


class Withheld(LookupError):
    """This question was released without its verdicts: they come with the feedback."""


class SealError(ValueError):
    """These bytes are no sealed questions, or were changed."""


def seal(bank: Bank, module: str, verdicts_for_tests: bool) -> bytes:
    """The sealed file of a module, the same bytes for the same questions. Raises KeyError for an unknown module."""
    questions = {}
    for question in bank.of(module):
        ship = verdicts_for_tests or question.use != "test"
        questions[question.id] = _sealed_question(question, ship)
    head = bank.modules[module]
    content = {
        "format": FORMAT,
        "edition": bank.edition,
        "module": module,
        "title": head.title,
        "concepts": head.concepts,
        "questions": questions,
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _sealed_question(question: Question, verdicts: bool) -> dict[str, Any]:
    filled = [Filled(question, draw) for draw in variants(question)]
    shown = [asdict(drawn(each, variant)) for variant, each in enumerate(filled)]
    common = {name: shown[0][name] for name in ("use", "kind", "concept", "cell", "unit")}
    varying = [{name: each[name] for name in ("stem", "options", "rows")} for each in shown]
    if not verdicts:
        return {**common, "variants": varying}
    plain = [_boxes(question.kind, entries(each)) for each in filled]
    packed = [{name: _pack(box) for name, box in boxes.items()} for boxes in plain]
    size = -(-max(len(data) for boxes in packed for data in boxes.values()) // STEP) * STEP
    salt = hashlib.sha256(json.dumps(plain).encode()).digest()[:16]  # other texts, another key
    master = _master(question.id, salt)
    for variant, boxes in enumerate(packed):
        varying[variant]["boxes"] = {
            name: _lock(_key(master, variant, name), data.ljust(size, b"\0")) for name, data in sorted(boxes.items())
        }
    return {**common, "salt": salt.hex(), "variants": varying}


def _boxes(kind: str, entries: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """What is sealed together: for options each entry by its key, else all of them."""
    if kind in ("choice", "several"):
        return {entry.part.key: [asdict(entry)] for entry in entries}
    return {"all": [asdict(entry) for entry in entries]}


@dataclass(frozen=True)
class Sealed:
    """A sealed file; what an answer opens is read from it, and nothing else. edition: "" in older files."""

    module: str
    title: str
    concepts: tuple[str, ...]
    questions: Mapping[str, Mapping[str, Any]]
    edition: str = ""

    @classmethod
    def load(cls, content: bytes) -> "Sealed":
        """Raises SealError for what is no sealed file, or one of another format."""
        try:
            raw = json.loads(content)
            if raw["format"] != FORMAT:
                raise SealError(f"sealed questions of format {raw['format']}, not {FORMAT}: run `make course` again")
            edition = str(raw.get("edition", ""))
            return cls(raw["module"], raw["title"], tuple(raw["concepts"]), dict(raw["questions"]), edition)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, SealError):
                raise
            raise SealError("no sealed questions: the file is damaged; run `make course` again") from error

    def ids(self, use: str | None = None) -> tuple[str, ...]:
        """Ids of the questions in their order; use: only the cards, tests or predictions."""
        return tuple(name for name, question in self.questions.items() if use is None or question["use"] == use)

    def variants(self, question_id: str) -> int:
        """How many variants a question has. Raises KeyError for an unknown one, as all methods do."""
        return len(self._question(question_id)["variants"])

    def withheld(self, question_id: str) -> bool:
        """Whether the verdicts of this question were left out."""
        return "salt" not in self._question(question_id)

    def drawn(self, question_id: str, variant: int, learner: str = "") -> Drawn:
        """The question as this learner sees this variant. Raises IndexError for one that it does not have."""
        question = self._question(question_id)
        varying = _variant(question_id, question, variant)
        common = {name: question[name] for name in ("use", "kind", "concept", "cell", "unit")}
        return Drawn(
            id=question_id,
            module=self.module,
            variant=variant,
            stem=varying["stem"],
            options=tuple(Shown(**option) for option in varying["options"]),
            rows=tuple(Shown(**row) for row in varying["rows"]),
            **common,
        ).shuffled(learner)

    def judge(self, question_id: str, variant: int, answer: Answer) -> Verdict:
        """As `verdict.judge`, from what the answer opens. Raises Withheld where no verdict was shipped, AnswerError."""
        shown = self.drawn(question_id, variant)
        if answer is None:
            return Verdict(False)
        answer = shown.checked(answer)
        return weigh(shown, self._open(question_id, variant, [answer] if shown.kind == "choice" else None), answer)

    def explain(self, question_id: str, variant: int) -> tuple[Part, ...]:
        """As `verdict.explain`, for after a test was handed in. Raises Withheld."""
        return tuple(entry.part for entry in self._open(question_id, variant))

    def _question(self, question_id: str) -> Mapping[str, Any]:
        if question_id not in self.questions:
            raise KeyError(f"module {self.module} has no question {question_id!r}; it has {', '.join(self.questions)}")
        return self.questions[question_id]

    def _open(self, question_id: str, variant: int, keys: Sequence[str] | None = None) -> tuple[Entry, ...]:
        """The entries in the boxes of these keys, None for all."""
        question = self._question(question_id)
        if "salt" not in question:
            raise Withheld(f"the explanations of {question_id} come with the feedback")
        boxes = _variant(question_id, question, variant)["boxes"]
        master = _master(question_id, bytes.fromhex(question["salt"]))
        found: list[Entry] = []
        for name in boxes if keys is None else keys:
            raw = _unpack(_unlock(_key(master, variant, name), boxes[name]))
            found += [Entry(**{**each, "part": Part(**each["part"])}) for each in raw]
        return tuple(found)


def _variant(question_id: str, question: Mapping[str, Any], variant: int) -> Mapping[str, Any]:
    drawn = question["variants"]
    return drawn[checked_variant(question_id, variant, len(drawn))]


@cache
def _master(question_id: str, salt: bytes) -> bytes:
    return hashlib.scrypt(question_id.encode(), salt=salt, n=COST, r=8, p=1, dklen=32)


def _key(master: bytes, variant: int, name: str) -> bytes:
    return hmac.digest(master, f"{variant}/{name}".encode(), "sha256")


def _lock(key: bytes, data: bytes) -> str:
    masked = _mask(key, data)
    return base64.b64encode(hmac.digest(key, masked, "sha256")[:TAG] + masked).decode()


def _unlock(key: bytes, blob: str) -> bytes:
    content = base64.b64decode(blob)
    tag, masked = content[:TAG], content[TAG:]
    if not hmac.compare_digest(tag, hmac.digest(key, masked, "sha256")[:TAG]):
        raise SealError("a sealed explanation was changed; run `make course` again")
    return _mask(key, masked)


def _mask(key: bytes, data: bytes) -> bytes:
    stream = hashlib.shake_256(b"minidist" + key).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))


def _pack(entries: list[dict[str, Any]]) -> bytes:
    return zlib.compress(json.dumps(entries, ensure_ascii=False).encode(), 9)


def _unpack(data: bytes) -> list[dict[str, Any]]:
    return json.loads(zlib.decompressobj().decompress(data))
