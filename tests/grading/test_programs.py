"""Programs as models write them: which block is the answer, and what a program may expect of the place where it runs."""

import contextlib
import socket
import threading

import pytest

from tepo_core.grading.code_grader import CodeGrader, assemble, extract_code, make_gold, read_gold
from tepo_core.grading.code_sandbox import Limits, run_program
from tepo_core.grading.types import Outcome

LIMITS = Limits(timeout=5, wall=20, memory=512 << 20)
PROMPT = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum of xs. """\n'
GOLD = make_gold(prompt=PROMPT, entry_point="total", tests="assert total([1, 2]) == 3\nassert total([]) == 0")
RIGHT = "def total(xs):\n    return sum(xs)"
WRONG = "def total(xs):\n    return 0"


def graded(response, gold=GOLD):
    return CodeGrader(limits=LIMITS, workers=1).grade(golds=[gold], responses=[response], truncated=[False])[0]


def fenced(code, mark="```", info="python", indent="", behind=""):
    lines = [f"{mark}{info}", *code.split("\n"), f"{mark}{behind}"]
    return "\n".join((indent + line) if line else line for line in lines)


BULLET = "1. ```python\n   def total(xs):\n       return sum(xs)\n   ```\n2. Done."
EXAMPLE = 'def total(xs):\n    """Sum.\n\n    ```python\n    >>> total([1])\n    ```\n    """\n    return sum(xs)'
MARGIN = 'r"""\n```\ntotal([1])\n```\n"""\ndef total(xs):\n    return sum(xs)'
MARKER = "def total(xs):\n    fence = '```'  # ```\n    return sum(xs)"


@pytest.mark.parametrize(
    "response",
    [
        # line ends
        fenced(RIGHT).replace("\n", "\r\n"),
        fenced(RIGHT).replace("\n", "\r"),
        "Here:\r\n" + fenced(RIGHT) + "\r\nDone.\r\n",
        "    x = sum(xs)\r\n    return x\r\n",
        # indentation
        f"- Like this:\n\n{fenced(RIGHT, indent='  ')}\n- Done.",
        f"1. Like this:\n\n{fenced(RIGHT, indent='     ')}\n",
        f"* this\n{fenced(RIGHT, indent=chr(9))}\n",
        BULLET,
        f"- ```python\n{RIGHT}\n```",  # the list forgotten inside it
        f"   ```python\n{RIGHT}\n```",
        f"```python\n{RIGHT}\n  ```",
        # behind the closing fence
        fenced(RIGHT, behind=" This sums the list."),
        fenced(RIGHT, behind="."),
        fenced(RIGHT, behind="</answer>"),
        f"```python\n{RIGHT}```",
        f"```python\n{RIGHT}  ```  Done.",
        # a fence inside the program
        fenced(EXAMPLE),
        fenced(EXAMPLE.replace('"""', "'''").replace("```python", "```")),
        fenced(MARGIN),
        fenced(MARKER),
        f"- Text\n{fenced(EXAMPLE, indent='  ')}",
        # other fences
        fenced(RIGHT, mark="~~~"),
        fenced(MARGIN, mark="````"),
        fenced(RIGHT, info='python title="a.py"'),
        fenced(RIGHT, info=""),
        # what else is in the answer
        f"{fenced(RIGHT)}\nIt prints:\n{fenced('3', info='')}\n",
        f"It's a plan:\n{fenced(chr(34) * 3 + ' said', info='text')}\n{fenced(RIGHT)}\n",
        f"First, wrong:\n{fenced('def total(xs):' + chr(10) + '    ' + chr(34) * 3 + 'open')}\nNow:\n{fenced(EXAMPLE)}",
        f"{fenced(RIGHT)}\nUse it:\n```python\nprint(total([1]))",  # the example that never ends is no new answer
        "\ufeff" + RIGHT,
        EXAMPLE,
        EXAMPLE.split("\n", 1)[1],
        f"{fenced(RIGHT)}\n```",
        f"{fenced(RIGHT, behind=' text that follows')}",
    ],
)
def test_the_program_is_found(response):
    grade = graded(response)
    assert grade.outcome is Outcome.CORRECT, grade.extracted


@pytest.mark.parametrize(
    "response",
    [
        f"{fenced(RIGHT)}\nBetter:\n```python\ndef total(xs):\n    return s",  # the answer was taken back
        f"{fenced(RIGHT)}\nBetter:\n~~~\ndef total(xs):\n    return sum(xs)",
        f"{fenced('import math')}\nNow:\n```python\nx = 1",
        f"```python\n{RIGHT}\n",
        f"```python\n{RIGHT}\n~~~\n",  # closed by another mark: not closed
        f"````\n{RIGHT}\n```\n",
    ],
)
def test_a_last_block_that_never_ends_is_no_answer(response):
    assert graded(response).outcome is Outcome.NO_ANSWER


def test_the_last_answer_counts_whichever_way_it_is_fenced():
    assert graded(f"{fenced(RIGHT)}\r\nor\r\n{fenced(WRONG, indent='   ')}").outcome is Outcome.WRONG
    assert graded(f"{fenced(WRONG, behind=' no:')}\n{fenced(RIGHT, mark='~~~')}").outcome is Outcome.CORRECT
    assert graded(f"{fenced(EXAMPLE)}\nrather\n{fenced(WRONG)}").outcome is Outcome.WRONG


def test_searching_for_blocks_is_linear_in_hostile_text():
    specification = read_gold(GOLD)
    n = 50_000
    texts = ["```\n" * n, '```python\n"""' * n, "`" * 5 * n, "```\n'\n" * n, '"""\n```' * n, " " * 10 * n]
    texts += ["```\n'" + "\\'" * n, '```\n"""' + '\\"""' * n, '```\n\\"""\n```\n' * n, "- " * n, "\"\"\"\n'''\n```\n" * n]
    for text in texts:
        extract_code(text, specification)


DATACLASS = """from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class Sum:
    kept: ClassVar[int] = 0
    xs: list[int] = field(default_factory=list)


def total(xs: list[int]) -> int:
    return sum(Sum(xs).xs)"""
PICKLED = "import pickle\nclass Sum(list): pass\ndef total(xs):\n    return sum(pickle.loads(pickle.dumps(Sum(xs))))"
HINTS = "import typing\nclass Sum:\n    xs: 'Xs'\nXs = list\ndef total(xs):\n    return sum(xs, len(typing.get_type_hints(Sum)) - 1)"
NAMED = "import sys\ndef helper(xs): return sum(xs)\ndef total(xs): return sys.modules[__name__].helper(xs)"
ENUM = "import enum, pickle\nclass Kind(enum.Enum):\n    A = 0\ndef total(xs): return sum(xs, pickle.loads(pickle.dumps(Kind.A)).value)"


@pytest.mark.parametrize("code", [DATACLASS, PICKLED, HINTS, NAMED, ENUM])
def test_a_program_is_a_module(code):
    assert graded(fenced(code)).outcome is Outcome.CORRECT, run_program(assemble(read_gold(GOLD), code), LIMITS)


@pytest.mark.parametrize(
    "code",
    [
        f"from __future__ import annotations\n{RIGHT}",
        f"from __future__ import (\n    annotations,\n    division,\n)\n{RIGHT}",
        f"import math\nfrom __future__ import annotations; import re\n\n{RIGHT}\nassert re and math",
        f'"""The sum."""\n# first\nfrom __future__ import annotations as a  # why not\n{RIGHT}',
    ],
)
def test_imports_from_the_future_come_first(code):
    assert graded(fenced(code)).outcome is Outcome.CORRECT, run_program(assemble(read_gold(GOLD), code), LIMITS)
    bare = make_gold(prompt="", entry_point="total", tests=f"from __future__ import division\n{read_gold(GOLD)['tests']}")
    assert graded(fenced(code), bare).outcome is Outcome.CORRECT


def test_text_about_the_future_stays_where_it_is():
    code = 'def total(xs):\n    """\nfrom __future__ import braces\n    """\n    assert "braces" in total.__doc__\n    return sum(xs)'
    assert graded(fenced(code)).outcome is Outcome.CORRECT
    assert graded(fenced(f"from __future__ import braces\n{RIGHT}")).outcome is Outcome.WRONG


ASYNC = """import asyncio

async def double(x):
    await asyncio.sleep(0)
    return 2 * x

async def work():
    return await asyncio.gather(*map(double, range(3)), asyncio.to_thread(int, '7'))

assert asyncio.run(work()) == [0, 2, 4, 7]
"""
PAIR = "import socket\na, b = socket.socketpair()\na.send(b'x')\nassert b.recv(1) == b'x'"


@pytest.mark.parametrize("isolation", ["kernel", "python"])
@pytest.mark.parametrize("program", [ASYNC, PAIR, "import asyncio\nasyncio.new_event_loop().close()"])
def test_asyncio_runs(program, isolation):
    result = run_program(program, LIMITS, isolation=isolation)
    assert result.status == "passed", result


def test_an_asynchronous_answer_passes():
    code = f"import asyncio\nasync def add(xs): return sum(xs)\ndef total(xs): return asyncio.run(add(xs))"  # noqa: F541
    assert graded(fenced(code)).outcome is Outcome.CORRECT


NETWORK = {
    "internet": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "unix stream": "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect('{path}')",
    "unix datagram": "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '{path}')",
    "datagram pair": "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'x', '{path}')",
    "packet pair": "import socket\na, b = socket.socketpair(type=socket.SOCK_SEQPACKET)",
    "pair that connects": "import socket\na, b = socket.socketpair()\na.connect('{path}')",
    "pair that binds": "import socket\na, b = socket.socketpair()\na.bind('\\0tepo')",
    "server": "import asyncio\nasync def main():\n    assert (await asyncio.start_server(print, '::', 0)).sockets\nasyncio.run(main())",
    "process": "import asyncio\nasync def main():\n    await asyncio.create_subprocess_exec('true')\nasyncio.run(main())",
    "from a descriptor": "import socket, os\ns = socket.socket(fileno=os.dup(0))\ns.connect('{path}')",
}


@pytest.mark.parametrize("isolation", ["kernel", "python"])
@pytest.mark.parametrize("name", NETWORK)
def test_the_network_stays_closed(name, isolation, tmp_path):
    path, heard = tmp_path / "s", []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if "datagram" in name else socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.settimeout(0.2)

        def listen():
            with contextlib.suppress(OSError):  # a time-out is one
                heard.append(listener.recv(1) if "datagram" in name else listener.accept())

        if "datagram" not in name:
            listener.listen()
        result = run_program(NETWORK[name].format(path=path), LIMITS, isolation=isolation)
        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
    assert result.status == "failed" and "Error" in result.note and not heard, result


def test_a_program_beyond_its_limits_failed_and_a_machine_that_was_busy_proves_nothing():
    """CPU time, memory and output are the program's own doing: reward 0 and in the mean. The clock and a crash are no verdict."""
    limits = Limits(timeout=1, wall=3, memory=256 << 20)
    bodies = ["while True: pass", "return bytearray(10**10)", "print('x' * 2**21)", "import time; time.sleep(9)"]
    responses = [f"    {body}\n" for body in [*bodies, "import ctypes; ctypes.string_at(0)"]]
    grades = CodeGrader(limits=limits, workers=1).grade(golds=[GOLD] * 5, responses=responses, truncated=[False] * 5)
    outcomes = [Outcome.TIMEOUT, Outcome.ERROR, Outcome.ERROR, Outcome.TIMEOUT, Outcome.ERROR]
    assert [grade.outcome for grade in grades] == outcomes and {grade.reward for grade in grades} == {0.0}
    assert [grade.graded for grade in grades[1:]] == [True, True, False, False]
    assert grades[0].graded or "clock" in run_program("while True: pass", limits).note
