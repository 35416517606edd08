"""What came of an answer: points for each criterion, and for a failed one what the learner needs to know."""

from dataclasses import dataclass

STATES = ("passed", "failed", "blocked")


@dataclass(frozen=True)
class Result:
    """One criterion. state: passed, failed, or blocked, where it could not be judged here. points: earned, of `most`.

    text: the report's lines, empty where it passed. mistake: its id in misconceptions.yaml, empty where none is known.
    """

    name: str
    state: str
    points: int
    most: int
    text: str = ""
    mistake: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES or not 0 <= self.points <= self.most:
            raise ValueError(f"{self.name}: {self.state} with {self.points} of {self.most} points")


@dataclass(frozen=True)
class Report:
    """An exercise, judged. printed: what each rank of the last run printed, shortened."""

    exercise: str
    function: str
    results: tuple[Result, ...]
    printed: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)

    @property
    def most(self) -> int:
        return sum(result.most for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether every criterion is passed."""
        return all(result.state == "passed" for result in self.results)

    def result(self, name: str) -> Result:
        """The criterion of this name."""
        return next(result for result in self.results if result.name == name)

    def lost(self) -> list[str]:
        """Names of the criteria that are not passed."""
        return [result.name for result in self.results if result.state != "passed"]

    def text(self) -> str:
        """What the learner reads."""
        rows = [f"{self.exercise} {self.function}: {self.points} of {self.most} points"]
        for result in self.results:
            score = f"{result.points} of {result.most}"
            waits = result.state == "failed" and not result.text and result is not self.results[0]
            rows.append(f"  {result.name:<24} {'waits' if waits else result.state:<8} {score}")
        rows += [f"\n{result.text}" for result in self.results if result.text]
        said = [f"  rank {rank}: {text.rstrip()}" for rank, text in enumerate(self.printed) if text.strip()]
        return "\n".join([*rows, *(["\nprinted:", *said] if said else [])])
