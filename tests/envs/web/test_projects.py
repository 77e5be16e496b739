"""The web projects of the repository: references pass all checks, every step has something to do; sites and graders."""

import asyncio
import contextlib

import pytest

from rlx.envs.env import ToolCall
from rlx.envs.grading import Outcome
from rlx.envs.web import checks
from rlx.envs.web.browser import BrowserBroken
from rlx.envs.web.checks import Answer, Asked, Check, run_checks
from rlx.envs.web.project import (
    Project,
    ProjectStep,
    WebProject,
    project_task,
    read_project,
    read_projects,
    tasks_of,
)
from rlx.envs.web.site import site_of
from rlx.sandbox.base import SandboxError
from tests.workshop import sandboxes, tar, workshop

PROJECTS = {project.name: project for project in read_projects()}


def failed(checks):
    return [f"{c.name}: {c.detail}" for c in checks if not c.passed]


async def checked(shop, work):
    """What comes of each (files, check), one after the other on one profile."""
    sites = iter([tar(files) for files, _ in work])
    return await run_checks(shop.browser, lambda: site_of(next(sites), shop.sandboxes), [check for _, check in work])


@pytest.mark.slow
@pytest.mark.parametrize("some", [slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)])
def test_references_pass_everything_and_no_step_is_done_before_it_is_begun(some):
    async def undone(shop, project, k):
        """Whether a check of step k fails on what the steps before it leave: the first one does, where it can."""
        for check in project.steps[k].checks:
            if failed(await checked(shop, [(project.solved(k), check)])):
                return True
        return False

    async def main():
        async with workshop() as shop:
            for project in list(PROJECTS.values())[some]:
                steps = project.steps
                solved = [(project.solved(len(steps)), check) for step in steps for check in step.checks]
                assert failed(await checked(shop, solved)) == [], project.name
                # Beside one another: what fails waits for most of its time.
                asking = await asyncio.gather(*(undone(shop, project, k) for k in range(len(steps))))
                assert all(asking), f"{project.name}: step {asking.index(False) + 1} asks for nothing"

    asyncio.run(main())


SMALL = Project(
    "small",
    {"index.html": "<h1 id='a'>One</h1>"},
    (
        ProjectStep("Write two.", (Check("two", (("open", "/"),), (("text", "#a", "Two"),)),), {}),
        ProjectStep(
            "Write three.",
            (
                Check("three", (("open", "/"),), (("contains", "#a", "Two"), ("text", "#b", "Three"))),
                Check("no forgery", (("open", "/"),), (("count", ".nothing", 0),)),
            ),
            {},
        ),
    ),
)
TWO, THREE = "<h1 id='a'>Two</h1>", "<h1 id='a'>Two</h1><p id='b'>Three</p>"


def session(*actions, project=SMALL, partial_credit=True, kind="bubblewrap", break_browser=False):
    """(what each action was told, the grade) of a session."""

    async def main():
        async with workshop(project, kind=kind) as shop:
            env = WebProject(project_task("web", project), shop, partial_credit=partial_credit)
            try:
                told = [await env.reset()]
                told += [(await env.step(action)).observation for action in actions]
                if break_browser:
                    shop.browser.page = broken
                return told, await env.grade()
            finally:
                await env.close()

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def broken(serve):
    raise BrowserBroken("it fell over")
    yield


def call(tool, **arguments):
    return ToolCall(tool, arguments)


@pytest.mark.slow
def test_a_session_edits_files_runs_commands_and_goes_from_step_to_step():
    told, grade = session(
        call("list_files"),
        call("read_file", path="index.html"),
        call("replace", path="index.html", old="One", new="Two"),
        call("replace", path="index.html", old="One", new="Two"),
        "Done.",
        call("run", command="cat index.html; echo oops >&2; exit 3"),
        call("write_file", path="index.html", content=THREE),
        call("read_file", path="../secret"),
        call("read_file", path="missing.txt"),
    )
    assert "Step 1: Write two." in told[0]
    assert "Files: index.html" in told[0]
    assert told[1:3] == ["index.html", "<h1 id='a'>One</h1>"]
    assert told[3] == "replaced in index.html"
    assert told[4].startswith("error: the text occurs 0 times")
    assert told[5] == "Step 2: Write three."
    assert told[6].splitlines() == [TWO, "oops", "exit status 3"]
    assert told[8].startswith("error: '../secret'")
    assert told[9].startswith("error: there is no file")
    assert (grade.reward, grade.outcome, grade.extracted) == (1.0, Outcome.GRADED, "3 of 3 checks")


@pytest.mark.slow
@pytest.mark.parametrize("partial_credit, reward", [(True, 2 / 3), (False, 0.0)])
def test_work_so_far_has_its_share_of_the_checks(partial_credit, reward):
    _, grade = session(call("write_file", path="index.html", content=TWO), partial_credit=partial_credit)
    assert grade.reward == pytest.approx(reward)
    assert grade.detail.startswith("three: text #b: expected 'Three'")


@pytest.mark.slow
def test_a_page_cannot_forge_its_checks_or_stop_them(monkeypatch):
    forged = """<h1 id='a'>One</h1><script>
      document.querySelector = () => ({ innerText: "Two", textContent: "Two" });
      Object.defineProperty(HTMLElement.prototype, "innerText", { get: () => "Two" });
      Object.defineProperty(Node.prototype, "textContent", { get: () => "Two" });
      fetch("http://example.com/").catch(() => 0); open("/other");
    </script>"""
    _, grade = session(call("write_file", path="index.html", content=forged))
    assert grade.reward == pytest.approx(1 / 3)
    endless = f"{THREE}<script>for (;;);</script>"
    monkeypatch.setattr(checks, "CHECK_S", 3.0)
    _, grade = session(call("write_file", path="index.html", content=endless))
    assert (grade.reward, grade.outcome) == (0.0, Outcome.GRADED)
    assert "2 pages before it hung" in grade.detail


DEEP, SPARSE = "mkdir -p " + "d/" * 60, "truncate -s 8000000 x y z"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, said",
    [(DEEP, "directories more than 48 deep"), (SPARSE, "bytes long, more than sandbox.limits.disk_bytes")],
)
def test_a_workspace_that_cannot_be_judged_is_worth_nothing(command, said):
    told, grade = session(
        call("run", command=command),
        call("run", command="a\0b"),
        call("read_file", path="\ud800"),
        call("write_file", path="a", content="\ud800"),
        call("run", command="printf x > $(printf 'a\\377')"),
        call("list_files"),
    )
    assert all(text.startswith("error: ") for text in told[2:4])
    assert told[4] == "wrote a"
    assert told[6].encode()
    assert (grade.reward, grade.outcome) == (0.0, Outcome.GRADED)
    assert said in grade.detail


@pytest.mark.slow
def test_a_sandbox_that_fails_in_a_page_s_request_is_no_verdict():
    class Broken:
        async def respond(self, asked):
            raise SandboxError("it fell over")

        async def restart(self):
            return None

    @contextlib.asynccontextmanager
    async def opened():
        yield Broken()

    async def main():
        async with workshop(SMALL) as shop:
            with pytest.raises(SandboxError, match="it fell over"):
                await run_checks(shop.browser, opened, SMALL.steps[0].checks)

    asyncio.run(main())


@pytest.mark.slow
def test_a_browser_that_fails_is_no_verdict():
    _, grade = session(break_browser=True)
    assert (grade.reward, grade.outcome, grade.detail) == (0.0, Outcome.ERROR, "BrowserBroken: it fell over")


def site(files, *asked, kind="subprocess"):
    """The answers of the site in a workspace."""

    async def main():
        async with sandboxes(kind) as opened, site_of(tar(files), opened) as served:
            return [await served.respond(Asked("GET", path, {}, b"")) for path in asked]

    return asyncio.run(main())


def test_files_are_a_site():
    index, script, missing = site({"index.html": b"<p>", "a/app.js": b"1"}, "/?q=1", "/a/app.js", "/no")
    assert index == Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<p>")
    assert script.headers["Content-Type"].startswith("text/javascript")
    assert missing.status == 404


SERVERS = {
    "ends at once": "import sys; sys.exit('no')",
    "says nonsense": "import os, socket\ns = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))\n"
    "while True:\n    c, _ = s.accept(); c.sendall(b'nonsense'); c.close()",
    "writes the relay's files": "import glob, os, time\nwhile True:\n    time.sleep(0.01)\n"
    "    for d in glob.glob('.relay-*'):\n        open(d + '/said-0', 'w').write('[]')",
    "removes the relay's files": "import glob, os, shutil, time\nwhile True:\n    time.sleep(0.001)\n"
    "    for d in glob.glob('.relay-*'):\n        shutil.rmtree(d, ignore_errors=True); open(d, 'w').close()",
}
REDIRECTS = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(303); self.send_header("Location", "/seen"); self.end_headers()
    def do_GET(self):
        body = b"<h1>Seen</h1>" if self.path == "/seen" else b"<form method=post><button>Go</button></form>"
        self.send_response(200); self.send_header("Content-Type", "text/html"); self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_a_server_that_does_wrong_is_answered_for(server):
    [answer] = site({"server.py": server.encode()}, "/", kind="bubblewrap")
    assert answer.status == 502


DAEMON = """
import os, time
from http.server import BaseHTTPRequestHandler, HTTPServer
seen = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        seen.append(1)
        self.send_response(200); self.end_headers()
        self.wfile.write(str(len(seen)).encode())
if os.fork() == 0:
    os.setsid()
    HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
time.sleep(1000)
"""


def test_a_server_needs_no_turn_and_nothing_of_it_outlives_a_restart():
    asked = Asked("GET", "/", {}, b"")

    async def main():
        async with sandboxes(max_running=1) as opened:
            busy = asyncio.create_task((await opened.open()).run(["sleep", "60"]))
            async with site_of(tar({"server.py": DAEMON.encode()}), opened) as served:
                seen = [await served.respond(asked), await served.respond(asked)]
                await served.restart()
                seen.append(await served.respond(asked))
            busy.cancel()
            return [answer.body for answer in seen]

    assert asyncio.run(main()) == [b"1", b"2", b"1"]


@pytest.mark.slow
def test_a_form_that_is_answered_by_a_redirection_is_followed():
    check = Check("sent", (("open", "/"), ("click", "button")), (("text", "h1", "Seen"),))

    async def main():
        async with workshop(SMALL) as shop:
            return await checked(shop, [({"server.py": REDIRECTS.encode()}, check)])

    assert failed(asyncio.run(main())) == []


LATER = """
<form><input><button>Keep</button></form><ul></ul><script>
  const show = (notes) => document.querySelector("ul").innerHTML = notes.map((note) => `<li>${note}</li>`).join("");
  fetch("/notes").then((answer) => answer.json()).then(show);
  document.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    const body = document.querySelector("input").value;
    setTimeout(() => fetch("/notes", { method: "POST", body }), 250);
  };
</script>"""
KEEPS = """
import json, os, time
from http.server import BaseHTTPRequestHandler, HTTPServer
notes = []
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        time.sleep(0.2)
        notes.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204); self.end_headers()
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Type", "text/html"); self.end_headers()
        self.wfile.write(json.dumps(notes).encode() if self.path == "/notes" else open("index.html", "rb").read())
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_what_a_page_has_begun_is_waited_for_before_it_is_left_or_its_server_asked():
    keep = (("open", "/"), ("fill", "input", "milk"), ("press", "Enter"))
    checks = [
        Check("reloaded", (*keep, ("reload",)), (("texts", "li", ["milk"]),)),
        Check("asked", keep, (("responds", "GET", "/notes", "", 200, ["milk"]),)),
    ]
    files = {"server.py": KEEPS.encode(), "index.html": LATER.encode()}

    async def main():
        async with workshop(SMALL) as shop:
            return await checked(shop, [(files, check) for check in checks])

    assert failed(asyncio.run(main())) == []


LIVE = """
<button onclick="document.querySelector('p').innerText = 'Two'">Go</button><p>One</p><script>
  const listen = () => fetch("/wait").then(listen);
  listen();
</script>"""
WAITS = """
import os, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/wait":
            time.sleep(1)
        self.send_response(200); self.send_header("Content-Type", "text/html"); self.end_headers()
        self.wfile.write(open("index.html", "rb").read())
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_page_that_always_waits_for_its_server_can_be_used_and_left():
    check = Check(
        "used", (("open", "/"), ("click", "button"), ("reload",), ("click", "button")), (("text", "p", "Two"),)
    )
    files = {"server.py": WAITS.encode(), "index.html": LIVE.encode()}

    async def main():
        async with workshop(SMALL) as shop:
            return await checked(shop, [(files, check)])

    assert failed(asyncio.run(main())) == []


def test_projects_are_a_dozen_with_dependent_steps_and_distinct_tasks():
    assert len(PROJECTS) >= 12
    assert all(len(project.steps) >= 2 for project in PROJECTS.values())
    assert any("server.py" in project.start for project in PROJECTS.values())
    tasks = tasks_of("web", list(PROJECTS.values()))
    assert len({task.question for task in tasks}) == len(tasks)
    assert all(task.metadata.keys() == {"project", "first", "end"} for task in tasks), "checks stay with the grader"


@pytest.mark.parametrize(
    "text, said",
    [
        ("start = {}", "no web project"),
        ("[[step]]\ninstruction = 'x'\ncheck = [{name = 'a', expect = [['glows', '#a']]}]\n[start]", "'glows', '#a'"),
        ("[[step]]\ninstruction = 'x'\ncheck = [{name = 'a', expect = [['text', '#a']]}]\n[start]", "no expectation"),
        (
            "[[step]]\ninstruction = 'x'\ncheck = [{name = 'a', do = [['title', 'b']], expect = []}]\n[start]",
            "no action",
        ),
    ],
)
def test_files_that_are_no_projects_are_refused(tmp_path, text, said):
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_project(file)
