"""Cards: an answer explains itself where it is picked, is kept, and is there again after a restart."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from course.build import notebook_bytes
from grading import card as facade_card
from grading import shelf
from grading.card import card_widget, earlier
from grading.log import record
from grading.seal import SealError


def parts(box: Any) -> list[Any]:
    """All widgets of a box, from top to bottom."""
    return [box, *(each for child in getattr(box, "children", ()) for each in parts(child))]


def buttons(box: Any) -> list[Any]:
    return [each for each in parts(box) if each._view_name == "ButtonView"]


def shown(box: Any) -> str:
    """All prose of a card."""
    panes = [each for each in parts(box) if each._view_name == "OutputView"]
    return "\n".join(output["data"]["text/markdown"] for pane in panes for output in pane.outputs)


def option(desk: Any, question: str, right: bool) -> Any:
    """An option of a choice that is right, or one that is not."""
    asked = shelf.ask(question)
    return next(each for each in asked.drawn.options if asked.judge(each.key).right == right)


def test_nothing_is_told_before_an_answer(desk: Any):
    for question in ("sample-choice", "sample-several", "sample-order", "sample-number", "sample-trace"):
        asked = shelf.ask(question)
        box = card_widget(asked)
        assert shown(box) == asked.drawn.stem
        everything = str([each.get_state() for each in parts(box)])
        assert [part for part in asked.explain() if part.why in everything] == []
        assert "sample-twice" not in everything
        assert "sample-backwards" not in everything


@pytest.mark.parametrize("right", [True, False])
def test_a_picked_option_explains_itself_below_it_and_no_other(desk: Any, right: bool):
    asked, chosen = shelf.ask("sample-choice"), option(desk, "sample-choice", right)
    box = card_widget(asked)
    place = next(i for i, each in enumerate(parts(box)) if getattr(each, "description", "") == chosen.text)
    parts(box)[place].click()
    said = parts(box)[place + 1]
    (part,) = asked.judge(chosen.key).parts
    text = said.outputs[0]["data"]["text/markdown"]
    assert text.startswith("**Right.**" if right else "**Not right.**")  # in words, not by colour alone
    assert part.why in text
    assert f"cell `{part.cell}`" in text
    assert ("minidist-right" if right else "minidist-wrong") in said._dom_classes
    assert len(shown(box).split("**")) == 3  # one verdict
    (entry,) = desk.entries("answered")
    assert (entry["question"], entry["answer"], entry["right"]) == ("sample-choice", chosen.key, right)
    assert entry["mistakes"] == ([] if right else ["sample-twice"])
    assert entry["concept"] == "slices"


def test_answers_survive_a_restart_of_the_kernel(desk: Any):
    chosen = option(desk, "sample-choice", right=False)
    box = card_widget(shelf.ask("sample-choice"))
    next(each for each in buttons(box) if each.description == chosen.text).click()
    before = shown(box)
    desk.restart()
    assert shown(card_widget(shelf.ask("sample-choice"))) == before
    assert len(desk.entries("answered")) == 1  # showing it again is no new answer


def test_earlier_answers_that_no_longer_fit_are_left_out(desk: Any):
    for question, answer in (("sample-choice", "ffffff"), ("sample-several", ["ffffff"]), ("sample-order", ["a"])):
        asked = shelf.ask(question)
        record("answered", module="77", question=question, variant=asked.drawn.variant, answer=answer, right=False)
        assert shown(card_widget(asked)) == asked.drawn.stem


def test_other_kinds_are_checked_as_a_whole(desk: Any):
    asked = shelf.ask("sample-several")
    box = card_widget(asked)
    (check,) = buttons(box)
    check.click()
    assert "Not complete yet: tick every right one" in shown(box)
    assert desk.entries("answered") == []
    for each in parts(box):
        if each._view_name == "CheckboxView":
            each.value = each.description == "a reduce"
    check.click()
    said = shown(box)
    assert "**a reduce**: not right, and you chose it. Only the destination" in said
    assert "**an all-reduce**: right, and you did not choose it. Every rank contributes" in said
    for part in asked.explain():
        assert part.why in said


def test_an_unreadable_number_is_told_and_not_logged(desk: Any):
    asked = shelf.ask("sample-number")
    box = card_widget(asked)
    (field,) = [each for each in parts(box) if each._view_name == "TextView"]
    field.value = "a lot"
    buttons(box)[0].click()
    assert "'a lot' is not a number: type a number in bytes" in shown(box)
    assert "did not work" not in shown(box)
    assert desk.entries("answered") == []
    right = asked.judge(1.0).expected
    assert right is not None
    field.value = f"{right / 1000} kB"
    buttons(box)[0].click()
    assert "**Right.**" in shown(box)
    assert "a lot" not in shown(box)


def test_an_order_with_one_item_twice_is_told(desk: Any):
    box = card_widget(shelf.ask("sample-order"))
    menus = [each for each in parts(box) if each._view_name == "DropdownView"]
    for menu in menus:
        menu.value = menus[0].options[1][1]
    buttons(box)[0].click()
    assert "One of them is there twice" in shown(box)


def test_a_trace_explains_its_first_wrong_row_and_folds_what_follows(desk: Any, capsys: pytest.CaptureFixture[str]):
    asked = shelf.ask("sample-trace")
    box = card_widget(asked)
    for menu in [each for each in parts(box) if each._view_name == "DropdownView"]:
        menu.value = asked.drawn.options[0].key
    buttons(box)[0].click()
    first, folded = shown(box).split("<details><summary>")
    assert "rank 0" in first
    assert "The ring is closed" in first
    assert "predecessor in the circle is rank 1" not in first
    assert folded.startswith("What comes after this row builds on it.")
    assert "predecessor in the circle is rank 1" in folded
    desk.widgets(False)
    facade_card("sample-trace", "a a a")
    said = " ".join(capsys.readouterr().out.split())
    assert "The ring is closed" in said
    assert "or see what follows: the same call with rest=True." in said
    assert "predecessor in the circle is rank 1" not in said
    attempts = len(earlier(asked))
    facade_card("sample-trace", "a a a", rest=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "predecessor in the circle is rank 1" in said
    assert "rest=True" not in said
    assert len(earlier(asked)) == attempts  # reading on is no attempt


def test_every_control_has_a_name_and_can_be_reached_with_the_keyboard(desk: Any):
    native = {"ButtonView", "RadioButtonsView", "CheckboxView", "DropdownView", "TextView"}
    passive = {"VBoxView", "HBoxView", "OutputView", "HTMLView", "LabelView"}
    for question in ("sample-choice", "sample-several", "sample-order", "sample-number", "sample-trace"):
        for each in parts(card_widget(shelf.ask(question))):
            assert each._view_name in native | passive
            if each._view_name in native:
                assert each.description
                assert each.tabbable is not False


def test_clicks_from_other_threads_all_count(desk: Any):
    box = card_widget(shelf.ask("sample-choice"))
    threads = [threading.Thread(target=each.click) for each in buttons(box) * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(desk.entries("answered")) == 5 * len(buttons(box))
    assert shown(box).count("Right.**") == 1
    assert shown(box).count("Not right.**") == len(buttons(box)) - 1


def test_a_failure_in_a_callback_is_read_in_the_card(desk: Any):
    asked = shelf.ask("sample-choice")
    box = card_widget(asked)

    def broken(*_: Any) -> Any:
        raise SealError("a sealed explanation was changed; run `make course` again")

    desk.patch.setattr(type(asked.source), "judge", broken)
    buttons(box)[0].click()
    assert "run `make course` again" in shown(box)


def test_a_full_disk_is_read_in_the_card_and_the_answer_still_explained(desk: Any):
    box = card_widget(shelf.ask("sample-choice"))

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    with desk.patch.context() as patch:
        patch.setattr("os.fsync", full)
        buttons(box)[0].click()
    assert "is full. Free some space" in shown(box)
    assert "ight.**" in shown(box)
    assert len(desk.entries("answered")) == 1


def test_the_text_form_says_the_same(desk: Any, capsys: pytest.CaptureFixture[str]):
    desk.widgets(False)
    facade_card("sample-choice")
    printed = capsys.readouterr().out
    asked = shelf.ask("sample-choice")
    assert all(each.text in printed for each in asked.drawn.options)
    wrong = option(desk, "sample-choice", right=False)
    facade_card("sample-choice", "abc"[list(asked.drawn.options).index(wrong)])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Not right.")
    assert asked.judge(wrong.key).parts[0].why in printed
    facade_card("sample-choice", "z")
    assert "'z' is none of the options" in capsys.readouterr().out
    assert len(desk.entries("answered")) == 1


# ---- the questions at hand -------------------------------------------------------------------------------------------


def test_what_lies_nearest_is_asked(desk: Any):
    inner = desk.root / "ps77" / ".minidist" / "questions"
    inner.mkdir(parents=True)
    sealed = (desk.root / ".minidist" / "questions" / "77.json").read_text()
    (inner / "77.json").write_text(sealed.replace('"title": "Sample"', '"title": "Private"'))
    desk.patch.chdir(inner.parents[1])
    assert shelf.module("77").title == "Private"
    desk.patch.chdir(desk.root)
    assert shelf.module("77").title == "Sample"


def test_without_sealed_questions_the_repositorys_own_are_asked(desk: Any, tmp_path_factory: pytest.TempPathFactory):
    desk.patch.chdir(tmp_path_factory.mktemp("elsewhere"))
    desk.restart()
    assert "02" in [source.module for source in shelf.modules()]
    name = shelf.module("02").ids("card")[0]
    asked = shelf.ask(name)
    assert asked.drawn.stem
    assert asked.explain()


@pytest.mark.parametrize("content", ["", "{}", '{"format": 0}', "[1]", "no json"])
def test_an_older_or_damaged_file_says_what_to_do(desk: Any, capsys: pytest.CaptureFixture[str], content: str):
    (desk.root / ".minidist" / "questions" / "77.json").write_text(content)
    facade_card("sample-choice")
    said = capsys.readouterr().out
    assert "77.json cannot be read" in said
    assert "Run `make course`" in said
    desk.hand_out()  # as make course does
    facade_card("sample-choice")
    assert "A tensor of" in capsys.readouterr().out


def test_an_unknown_question_or_module_says_what_there_is(desk: Any):
    with pytest.raises(shelf.ShelfError, match="No question here is called 'sample'"):
        shelf.ask("sample")
    with pytest.raises(shelf.ShelfError, match="no questions for module '55'"):
        shelf.module("55")


def test_links_lead_to_the_notebook_that_is_open(desk: Any):
    assert shelf.link("77", "show-ring") == "cell `show-ring`"
    (desk.root / "77_sample.ipynb").touch()
    (desk.root / "77_sample.old.ipynb").touch()
    assert shelf.link("77", "show-ring") == "[cell `show-ring`](77_sample.ipynb#cell-id=show-ring)"
    desk.patch.setenv("JPY_SESSION_NAME", "/somewhere/77_mine.ipynb")
    assert "(77_mine.ipynb#" in shelf.link("77", "show-ring")
    desk.patch.setenv("JPY_SESSION_NAME", "/somewhere/78_other.ipynb")
    assert "(77_sample.ipynb#" in shelf.link("77", "show-ring")


def test_links_say_under_which_heading_a_cell_stands(desk: Any):
    source = '# %% [markdown]\n# # Sample\n#\n# ## A ring (20 minutes)\n\n# %% tags=["show-ring"]\n1\n'
    (desk.root / "77_sample.ipynb").write_bytes(notebook_bytes(source))
    assert shelf.link("77", "show-ring") == "[cell `show-ring`](77_sample.ipynb#cell-id=show-ring) under *A ring*"
    assert shelf.link("77", "gone") == "[cell `gone`](77_sample.ipynb#cell-id=gone)"
    drawn = replace(shelf.ask("sample-choice").drawn, stem="As in cell `show-ring`, on *r*.")
    assert shelf.linked(drawn) == f"As in {shelf.link('77', 'show-ring')}, on *r*."


def test_a_module_is_found_by_its_number_without_the_0():
    with pytest.raises(shelf.ShelfError, match=r'there are some for 00, 02, .*\. Did you mean "02"\?'):
        shelf.module("2")
