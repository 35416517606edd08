"""grading collect: from what a learning system gave you to submitted/LEARNER/NAME, one submission each.

inbox/NAME/ may hold zip files and folders of any layout, as long as each file's path or name says whose it is: by the
learner's id, email, name, or another word of the roster's column `also`. Of several submissions the newest counts; what
it replaces is kept in replaced/. What belongs to nobody in the roster stays where it is, and is reported.
"""

import argparse
import errno
import io
import os
import re
import shutil
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from grading.course.plain import plain
from grading.course.record import lateness, replace_folder, submitted_at
from grading.course.scratch import scratch
from grading.course.settings import Course, CourseError, Learner, load

LARGEST = 200 << 20  # bytes of one submission, unpacked
MOST_FILES = 2000
IGNORED = ("__MACOSX", ".ipynb_checkpoints", ".DS_Store", "Thumbs.db")
UNREADABLE = (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError, ValueError, EOFError)
NAME_PARTS = 3  # of a path, from the outside: who handed in stands in one of these


@dataclass(frozen=True)
class File:
    """One file handed in: its path as the learning system gave it, when, and where its bytes are.

    inner: its name in the archive, or where there is none its path. nested: if that is a zip file too, the name in it.
    """

    path: PurePosixPath
    when: datetime
    size: int
    archive: Path | None
    inner: str
    nested: str = ""

    def content(self) -> bytes:
        if self.archive is None:
            return Path(self.inner).read_bytes()
        with zipfile.ZipFile(self.archive) as archive:
            content = archive.read(self.inner)
        if not self.nested:
            return content
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.read(self.nested)


@dataclass
class Handed:
    """One submission of one learner, before it is decided which counts."""

    learner: str
    label: str
    files: list[File] = field(default_factory=list)

    @property
    def when(self) -> datetime:
        return max(file.when for file in self.files)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading collect", description="Sort what was handed in, by learner.")
    parser.add_argument("assignment")
    parser.add_argument("paths", nargs="*", type=Path, help="zip files or folders; otherwise inbox/ASSIGNMENT")
    options = parser.parse_args(argv)
    for line in collect(load(Path.cwd()), options.assignment, options.paths):
        print(plain(line))
    return 0


def collect(course: Course, name: str, paths: Sequence[Path] = ()) -> list[str]:
    """Bring submitted/ up to date from paths, by default inbox/NAME; returns a line for each thing to know."""
    course.assignment(name)
    roster = course.roster()
    places = list(paths) or [course.root / "inbox" / name]
    for place in places:
        if paths and not place.exists():
            raise CourseError(f"{place} does not exist: name a zip file or a folder")
    if not any(place.exists() for place in places) and not list(course.folder("submitted").glob(f"*/{name}")):
        raise CourseError(f"there is no {places[0]}: make it, and put there what your learning system gives you")
    lines: list[str] = []
    found: dict[str, list[Handed]] = {}
    for place in places:
        if place.exists():
            handed, strangers = _sort(_files(place, lines), roster)
            lines += strangers
            for each in handed:
                found.setdefault(each.learner, []).append(each)
    for learner, several in sorted(found.items()):
        try:
            lines += _take(course, name, learner, sorted(several, key=lambda each: each.when))
        except (*UNREADABLE, UnicodeError) as error:  # theirs alone; a full disk shows with the next one too
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            lines.append(f"{learner}: could not be collected ({error}); look at it by hand, or ask for it again")
    return [*lines, *_look_over(course, name, roster)]


def _files(place: Path, lines: list[str]) -> Iterator[File]:
    """Every file in a folder or zip file, zip files inside it unpacked once."""
    paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    for path in paths:
        relative = PurePosixPath(path.relative_to(place if place.is_dir() else place.parent).as_posix())
        if path.is_symlink() or any(part in IGNORED for part in relative.parts):
            continue
        if path.suffix.lower() == ".zip":
            try:
                yield from _in_archive(path, relative, lines)
            except UNREADABLE as error:
                lines.append(f"{path.name}: cannot be unpacked ({error}); ask for it again")
        else:
            about = path.stat()
            yield File(relative, datetime.fromtimestamp(about.st_mtime, UTC), about.st_size, None, str(path))


def _in_archive(path: Path, relative: PurePosixPath, lines: list[str]) -> Iterator[File]:
    with zipfile.ZipFile(path) as archive:
        for entry, parts in _entries(archive):
            outside = (*relative.parts[:-1], relative.stem)  # the archive may be named for its owner
            whole = File(PurePosixPath(*outside, *parts), _moment(entry, path), entry.file_size, path, entry.filename)
            if not parts[-1].lower().endswith(".zip") or entry.file_size > LARGEST:
                yield whole
                continue
            try:
                with zipfile.ZipFile(io.BytesIO(archive.read(entry))) as nested:
                    for each, more in _entries(nested):
                        below = PurePosixPath(*outside, *parts[:-1], PurePosixPath(parts[-1]).stem, *more)
                        yield replace(whole, path=below, size=each.file_size, nested=each.filename)
            except UNREADABLE as error:
                lines.append(f"{whole.path}: cannot be unpacked ({error}); ask for it again")


def _entries(archive: zipfile.ZipFile) -> Iterator[tuple[zipfile.ZipInfo, tuple[str, ...]]]:
    """The files of an archive that count, with the parts of their paths."""
    for entry in archive.infolist():
        inner = PurePosixPath(entry.filename.replace("\\", "/"))
        parts = tuple(part for part in inner.parts if part not in ("/", "..", "."))
        linked = (entry.external_attr >> 28) == 0o12
        if not (entry.is_dir() or linked or not parts or any(part in IGNORED for part in parts)):
            yield entry, parts


def _moment(entry: zipfile.ZipInfo, path: Path) -> datetime:
    """When a file was last changed; where the archive has no such date, when the archive was."""
    try:
        return datetime(*entry.date_time).astimezone(UTC)  # a zip file keeps local time
    except (ValueError, OverflowError):
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _sort(files: Iterable[File], roster: Mapping[str, Learner]) -> tuple[list[Handed], list[str]]:
    """Files by whose they are and which submission they belong to; and a line for each stranger."""
    handed: dict[tuple[str, str], Handed] = {}
    strangers: dict[str, int] = {}
    for file in files:
        who, depth, ambiguous = _whose(file.path, roster)
        if not who:
            label = ambiguous or file.path.parts[0 if file.archive is None else 1]
            strangers[label] = strangers.get(label, 0) + 1
            continue
        flat = depth == len(file.path.parts) - 1
        label = _label(file.path.parts[depth]) if flat else str(PurePosixPath(*file.path.parts[: depth + 1]))
        source = str(file.archive or "")
        key = who, f"{source}:{label}"
        handed.setdefault(key, Handed(who, label)).files.append(_below(file, depth, flat, who, roster))
    lines = [f"{label}: belongs to nobody in roster.csv, and was left where it is" for label in sorted(strangers)]
    return list(handed.values()), lines


def _label(name: str) -> str:
    """What flat files of one submission share: all before the file's own name, as in ada_LATE_31_7_x.ipynb."""
    numbers = re.match(r"(.*?_(?:LATE_)?\d+_\d+)_", name)
    return numbers[1] if numbers else name.split("_")[0]


def _below(file: File, depth: int, flat: bool, who: str, roster: Mapping[str, Learner]) -> File:
    """The file with its path inside the submission."""
    if not flat:
        parts = file.path.parts[depth + 1 :]
        return replace(file, path=PurePosixPath(*parts))
    name = file.path.name
    bare = re.sub(r"^.*?_(?:LATE_)?\d+_\d+_", "", name)
    if bare == name:
        for word in sorted(_words(roster[who]), key=len, reverse=True):
            stripped = re.sub(rf"^{re.escape(word)}[ _-]+", "", name, flags=re.IGNORECASE)
            if stripped != name:
                bare = stripped
                break
    return replace(file, path=PurePosixPath(bare))


def _whose(path: PurePosixPath, roster: Mapping[str, Learner]) -> tuple[str, int, str]:
    """The learner that a path names, and in which of its parts; and, if it names several, that part."""
    for depth, part in enumerate(path.parts[:NAME_PARTS]):
        last = depth == len(path.parts) - 1
        fits = {who: length for who, learner in roster.items() if (length := _fit(part, learner, last)) > 0}
        longest = [who for who, length in fits.items() if length == max(fits.values())]
        if len(longest) == 1:
            return longest[0], depth, ""
        if longest:
            return "", depth, f"{part} (could be {' or '.join(sorted(longest))})"
    return "", 0, ""


def _fit(part: str, learner: Learner, last: bool) -> int:
    """How many characters of a word for this learner stand at the head of a path's part, as whole words."""
    text = _folded(PurePosixPath(part).stem if last else part)
    fits = [len(word) for word in map(_folded, _words(learner)) if word and _starts(text, word)]
    return max(fits, default=0)


def _starts(text: str, word: str) -> bool:
    """Whether the text begins with this word, or has it as a whole one between its separators."""
    return re.search(rf"(?:^|[ _\-(]){re.escape(word)}(?:$|[ _\-)(])", text) is not None


def _words(learner: Learner) -> set[str]:
    first, last = learner.first_name, learner.last_name
    both = {f"{first} {last}", f"{last} {first}", f"{first}_{last}", f"{last}{first}", f"{last}, {first}"}
    return {learner.id, learner.email, *learner.also} | (both if first and last else set())


def _folded(text: str) -> str:
    """Lower case without accents."""
    return "".join(char for char in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(char))


def _take(course: Course, name: str, learner: str, several: list[Handed]) -> list[str]:
    """Make the newest submission the one that counts; returns what to know about it."""
    lines, newest = [], several[-1]
    if len(several) > 1:
        lines.append(f"{learner}: {len(several)} submissions; the newest counts, of {_when(newest.when)}")
    place = course.folder("submitted", name, learner)
    before = submitted_at(place)
    if before is not None and before.replace(tzinfo=UTC) >= newest.when.replace(microsecond=0):
        return lines  # collected already
    if sum(file.size for file in newest.files) > LARGEST or len(newest.files) > MOST_FILES:
        return [
            *lines,
            f"{learner}: more than {LARGEST >> 20} MB or {MOST_FILES} files; not collected, look at it by hand",
        ]
    with scratch(course.root, "collect") as folder:
        staged = folder / name
        for file in newest.files:
            target = staged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content())
        (staged / "timestamp.txt").write_text(newest.when.strftime("%Y-%m-%d %H:%M:%S.%f UTC"), encoding="utf-8")
        if place.exists():
            _keep(course, name, learner, place)
            lines.append(f"{learner}: a newer submission replaced the one of {_when(before) if before else 'before'}")
        replace_folder(staged, place)
    if not any(file.path.suffix == ".ipynb" for file in newest.files):
        lines.append(f"{learner}: no notebook among {', '.join(sorted(file.path.name for file in newest.files)[:4])}")
    return lines


def _keep(course: Course, name: str, learner: str, place: Path) -> None:
    """Copy what is about to be replaced to replaced/, numbered."""
    folder = course.folder("replaced", name, learner)
    number = 1 + len(list(folder.iterdir())) if folder.is_dir() else 1
    shutil.copytree(place, folder / str(number), symlinks=True)


def _look_over(course: Course, name: str, roster: Mapping[str, Learner]) -> list[str]:
    """What lies in submitted/, however it came there: the late, the strangers, those with no time."""
    lines, count = [], 0
    for place in sorted(course.folder("submitted").glob(f"*/{name}")):
        who = place.parent.name
        if who not in roster:
            lines.append(f"{who}: not in roster.csv; add a line there, or delete {place.relative_to(course.root)}")
            continue
        count += 1
        if submitted_at(place) is None:
            newest = max(
                (path.stat().st_mtime for path in place.rglob("*") if path.is_file()), default=os.stat(place).st_mtime
            )
            when = datetime.fromtimestamp(newest, UTC)
            (place / "timestamp.txt").write_text(when.strftime("%Y-%m-%d %H:%M:%S.%f UTC"), encoding="utf-8")
            lines.append(f"{who}: no time was given; {_when(when)} was taken, of its newest file")
        lines += _late(course, name, who, place)
    missing = sorted(set(roster) - {place.parent.name for place in course.folder("submitted").glob(f"*/{name}")})
    if missing:
        lines.append(f"nothing from {len(missing)}: {', '.join(missing)}")
    return [*lines, f"{count} of {len(roster)} handed in {name}"]


def _late(course: Course, name: str, who: str, place: Path) -> list[str]:
    late = lateness(course, name, who, submitted_at(place))
    extended = course.deadline(name, who) != course.assignment(name).due
    if late:
        hours = late.total_seconds() / 3600
        return [
            f"{who}: late by {f'{hours / 24:.1f} days' if hours >= 48 else f'{hours:.1f} hours'}"
            + (" after an extension" if extended else "")
        ]
    return [f"{who}: in time, with an extension"] if extended else []


def _when(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")
