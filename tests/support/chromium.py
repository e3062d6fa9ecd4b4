"""A page in headless Chromium, spoken to in its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE = "no Chromium is installed here (Debian and Ubuntu: apt-get install chromium)"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
PATIENCE = 60  # seconds, for the browser to start and for each answer


def find_chromium() -> str | None:
    """The program, by the names that systems give it."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page: what it says to the console, what it asks the network for, and answers of its scripts."""

    def __init__(self, send: IO[bytes], receive: IO[bytes]) -> None:
        self._send, self._receive = send, receive
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> Any:
        """A command's result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        message |= {"sessionId": self._session} if self._session else {}
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str) -> None:
        """Loads a page and lets it come to rest."""
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.ask("new Promise(done => requestAnimationFrame(() => setTimeout(done, 200)))")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Whatever the page, or the browser about it, wrote to the console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def open_tab(program: str) -> Iterator[Tab]:
    """A new tab of a new browser, which ends with it."""
    (child_in, parent_out), (parent_in, child_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile, open(Path(profile) / "log", "wb") as log:
        # The protocol is spoken on the file descriptors 3 and 4, which here are likely in use.
        script = f'exec "$@" 3<&{child_in} 4>&{child_out}'
        command = ["timeout", str(PATIENCE), "bash", "-c", script, "chromium", program, *FLAGS]
        browser = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], pass_fds=(child_in, child_out), stdout=log, stderr=log
        )
        os.close(child_in)
        os.close(child_out)
        try:
            with open(parent_out, "wb") as send, open(parent_in, "rb") as receive:
                tab = Tab(send, receive)
                yield tab
                tab._session = ""
                tab.call("Browser.close")
        finally:
            browser.terminate()
            browser.wait(PATIENCE)
