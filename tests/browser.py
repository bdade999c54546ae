"""A page in headless Chromium: what its script said, and a picture of it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

# Read when this is imported: the suites run without the user's FROST_* variables. .ci/run sets it: there
# the browser has to be there.
REQUIRED = os.environ.get("FROST_REQUIRE_BROWSER", "") not in ("", "0")
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 120

# Before anything of the page: keeps what goes wrong.
_LISTEN = """<script>window.__errors = [];
window.addEventListener("error", (e) => window.__errors.push(String(e.message)));
document.addEventListener("securitypolicyviolation", (e) => window.__errors.push("policy: " + e.blockedURI));
for (const level of ["error", "warn"]) { const old = console[level];
  console[level] = (...a) => { window.__errors.push(a.join(" ")); old.apply(console, a); }; }</script>"""
_TELL = """<script>(() => { let result; try { result = (() => { %s })(); } catch (e) { window.__errors.push(String(e)); }
const out = document.createElement("pre"); out.id = "told";
out.textContent = JSON.stringify({ result, errors: window.__errors }); document.body.append(out); })();</script>"""


def chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def _run(profile: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    program = chromium()
    assert program is not None
    return subprocess.run(
        [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--virtual-time-budget=4000",
            *argv,
        ],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def ask(page: str, script: str, folder: Path) -> tuple[Any, list[str]]:
    """What `script` (the body of a function) returns in the page, and every error, warning and console
    line.
    """
    path = folder / "asked.html"
    page = page.replace("<head>", "<head>" + _LISTEN, 1)
    path.write_text(page.replace("</body>", _TELL % script + "</body>"), encoding="utf-8")
    run = _run(folder / "profile", "--dump-dom", path.as_uri())
    found = re.search(r'<pre id="told">(.*?)</pre>', run.stdout, re.S)
    assert found, f"the page did not run: {run.stderr[-2000:]}"
    told = json.loads(html.unescape(found[1]))
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    return told.get("result"), [*told["errors"], *console]


def picture(path: Path, out: Path, folder: Path, size: tuple[int, int] = (1240, 1700)) -> Path:
    """A screenshot of the top of a page."""
    run = _run(
        folder / "profile",
        f"--window-size={size[0]},{size[1]}",
        "--hide-scrollbars",
        f"--screenshot={out}",
        path.as_uri(),
    )
    assert out.exists(), run.stderr[-2000:]
    return out
