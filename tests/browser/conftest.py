"""JupyterLab in headless Chromium: start both, drive them as a learner does, leave nothing running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from course.files import ROOT
from course.serve import Place, arguments, free_port

TOKEN = "browser-test"
PANEL = "const panel = [...window.jupyterapp.shell.widgets('main')].find(w => w.isVisible && w.content?.widgets);"
MISSING = "The browser test was left out: Chromium and its chromedriver are not both installed."
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

CONTRASTS = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const over = (top, under) => top.slice(0, 3).map((c, i) => c * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
const light = c => {
  const [r, g, b] = c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = node => {
  const layers = [];
  for (let at = node; at; at = at.parentElement) layers.unshift(rgb(getComputedStyle(at).backgroundColor));
  return layers.reduce((under, top) => over(top, under), [255, 255, 255]);
};
const found = [];
const walker = document.createTreeWalker(arguments[0].querySelector('.jp-Cell-outputArea'), NodeFilter.SHOW_TEXT);
for (let text = walker.nextNode(); text; text = walker.nextNode()) {
  const node = text.parentElement, words = text.textContent.trim();
  if (!words || !node.getClientRects().length || node.tagName === 'STYLE' || node.disabled) continue;
  const under = ground(node), ink = over(rgb(getComputedStyle(node).color), under);
  const [low, high] = [light(under), light(ink)].sort((a, b) => a - b);
  found.push([words.slice(0, 40), (high + 0.05) / (low + 0.05)]);
}
return found;
"""


def browser_and_driver() -> tuple[str, str] | None:
    """Chromium and its driver where both are installed."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextlib.contextmanager
def server(root: Path, scratch: Path) -> Iterator[str]:
    """JupyterLab on root, started as the course starts it; gives its address, and ends it with all its kernels."""
    place = Place(ssh=False, container=False, root=hasattr(os, "geteuid") and os.geteuid() == 0, browser=False)
    port, log = free_port(0), scratch / "server.log"
    extra = {
        "LabApp.expose_app_in_browser": True,  # so that the test can ask JupyterLab itself
        "LabApp.workspaces_dir": scratch / "workspaces",
        "LabApp.user_settings_dir": scratch / "settings",
    }
    options = [*arguments(place, port, TOKEN, "/lab", root), *(f"--{name}={value}" for name, value in extra.items())]
    environment = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            cwd=root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    base = f"http://127.0.0.1:{port}"
    try:
        _until_it_answers(f"{base}/api/status?token={TOKEN}", process, log)
        yield base
    finally:
        process.send_signal(signal.SIGTERM)  # shuts its kernels down first
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start: {log.read_text(errors='replace')[-2000:]}")


class Lab:
    """One browser window on a JupyterLab."""

    panel = PANEL

    def __init__(self, base: str, profile: Path, shots: Path) -> None:
        found = browser_and_driver()
        assert found is not None
        options = webdriver.ChromeOptions()
        options.binary_location = found[0]
        switches = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        switches += "disable-component-update disable-sync disable-dev-shm-usage window-size=1400,1700"
        for switch in [*switches.split(), f"user-data-dir={profile}"]:
            options.add_argument(f"--{switch}")
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
        self.driver.set_script_timeout(60)
        self.base, self.shots = base, shots

    def close(self) -> None:
        self.driver.quit()

    # ---- looking -----------------------------------------------------------------------------------------------------

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 120) -> Any:
        """Wait until condition() is true; a screenshot and what was waited for, if it never is."""
        try:
            return WebDriverWait(self.driver, seconds, 0.2).until(lambda _: condition())
        except Exception as error:
            raise AssertionError(f"waited {seconds:.0f} s for {what}; see {self.shot('failure')}") from error

    def cell(self, tag: str) -> Any:
        """The cell with this tag, brought into view: cells far away are not drawn."""
        found = self.js(
            self.panel
            + """const cells = panel.content.widgets;
                 const index = cells.findIndex(w => w.model.id === arguments[0]);
                 if (index < 0) return null;
                 panel.content.activeCellIndex = index;
                 panel.content.scrollToItem(index, 'start');
                 return cells[index].node;""",
            tag,
        )
        assert found is not None, f"no cell has the tag {tag}"
        return found

    def node(self, tag: str) -> Any:
        """The same without moving there."""
        return self.js(f"{PANEL} return panel.content.widgets.find(w => w.model.id === arguments[0]).node;", tag)

    def text(self, tag: str) -> str:
        """What a cell's outputs show."""
        outputs = self.cell(tag).find_elements(By.CSS_SELECTOR, ".jp-Cell-outputArea")
        return outputs[0].text if outputs else ""

    def said(self, tag: str) -> str:
        """The same in one step, for a page whose cells are still being drawn."""
        return self.js(
            PANEL
            + """const cells = panel.content.widgets, index = cells.findIndex(w => w.model.id === arguments[0]);
                 panel.content.scrollToItem(index, 'start');
                 return cells[index].node.querySelector('.jp-Cell-outputArea')?.innerText ?? '';""",
            tag,
        )

    def source(self, tag: str) -> str:
        find = "panel.content.widgets.find(w => w.model.id === arguments[0])"
        return self.js(f"{PANEL} return {find}.model.sharedModel.getSource();", tag)

    def contrasts(self, tag: str) -> list[tuple[str, float]]:
        """Each text in a cell's outputs, and the contrast of its colour to what it stands on, by WCAG's formula."""
        return [tuple(pair) for pair in self.js(CONTRASTS, self.cell(tag))]

    def shot(self, name: str) -> Path:
        """Save a picture of the window."""
        path = self.shots / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path

    def buttons(self, tag: str, words: str = "") -> list[Any]:
        """A cell's buttons whose text has these words."""
        return [each for each in self.cell(tag).find_elements(By.TAG_NAME, "button") if words in each.text]

    # ---- doing -------------------------------------------------------------------------------------------------------

    def open(self, path: str) -> None:
        """Open a notebook, or the launcher with ""; waits until its kernel can be used."""
        self.driver.get(f"{self.base}/lab/tree/{path}?token={TOKEN}&reset")
        ready = "return !!window.jupyterapp && !document.querySelector('#jupyterlab-splash')"
        self.wait(lambda: self.js(ready), "JupyterLab")
        if path:
            self.wait(lambda: self.js("return !!document.querySelector('.jp-Notebook .jp-Cell')"), path)
            self.wait(lambda: self._kernel_status() == "idle", "a kernel")
            self.js(f"{PANEL} window.jupyterapp.shell.activateById(panel.id);")

    def _kernel_status(self) -> str:
        return self.js(f"{PANEL} return panel?.sessionContext.session?.kernel?.status ?? 'none';")

    def command(self, name: str, **arguments: Any) -> None:
        """Run one of JupyterLab's commands, as its menus do."""
        self.js("window.jupyterapp.commands.execute(arguments[0], arguments[1]);", name, arguments)

    def run_all(self, seconds: float = 180) -> None:
        self.command("notebook:run-all-cells")
        time.sleep(0.5)
        self.idle(seconds)

    def run(self, tag: str, seconds: float = 120, wait: bool = True) -> None:
        """Run one cell."""
        self.cell(tag)
        self.command("notebook:run-cell")
        if wait:
            time.sleep(0.3)
            self.idle(seconds)

    def idle(self, seconds: float = 120) -> None:
        """Wait until no cell runs or waits to run."""
        prompts = "w.node.querySelector('.jp-InputPrompt')?.textContent.includes('*')"
        prompts = f"{PANEL} return panel.content.widgets.some(w => {prompts})"
        self.wait(lambda: not self.js(prompts) and self._kernel_status() == "idle", "the cells to finish", seconds)

    def restart(self) -> None:
        """Restart the kernel."""
        session = f"{PANEL} return panel.sessionContext.restartKernel().then(() => true)"
        assert self.js(session)
        self.wait(lambda: self._kernel_status() == "idle", "the restarted kernel")

    def answer_everything(self, tag: str) -> None:
        """Give some answer to every question of a test."""
        cell = self.cell(tag)
        for group in cell.find_elements(By.CSS_SELECTOR, ".widget-radio-box"):
            group.find_elements(By.TAG_NAME, "input")[0].click()
        for box in cell.find_elements(By.CSS_SELECTOR, "input[type=checkbox]"):
            box.click()
        for field in cell.find_elements(By.CSS_SELECTOR, "input[type=text]"):
            field.send_keys("12", Keys.TAB)
        for i, menu in enumerate(cell.find_elements(By.TAG_NAME, "select")):
            label = menu.find_element(By.XPATH, "../label").text.removesuffix(".")
            choices = Select(menu)
            place = int(label) if label.isdigit() else i  # an order has its places numbered, and each item once
            choices.select_by_index(1 + (place - 1) % (len(choices.options) - 1))

    def save(self) -> None:
        self.js(f"{PANEL} return panel.context.save();")
        self.wait(lambda: not self.js(f"{PANEL} return panel.context.model.dirty"), "saving")

    def theme(self, name: str) -> None:
        self.command("apputils:change-theme", theme=name)
        light = "true" if "Light" in name else "false"
        self.wait(lambda: self.js("return document.body.dataset.jpThemeLight") == light, name)
        time.sleep(0.5)

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus, as `"TAB"`, `"SPACE"` or text."""
        focused = self.driver.switch_to.active_element
        focused.send_keys(*(getattr(Keys, key, key) for key in keys))

    def foreign_addresses(self) -> list[str]:
        """What the page has loaded, or tried to load, from another machine."""
        loaded = self.js("return performance.getEntriesByType('resource').map(entry => entry.name);")
        return [name for name in loaded if name.startswith("http") and not name.startswith(self.base)]


@contextlib.contextmanager
def window(base: str, scratch: Path) -> Iterator[Lab]:
    """A browser window on a server."""
    lab = Lab(base, scratch / "profile", scratch)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="session")
def browser() -> Any:
    """How to start a server and a window: what tests cannot import from here."""
    return SimpleNamespace(server=server, window=window, token=TOKEN)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the screenshots are kept."""
    folder = tmp_path_factory.mktemp("browser")
    print(f"screenshots: {folder}")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if browser_and_driver() is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if browser_and_driver() is None:
        terminalreporter.write_line(MISSING)
