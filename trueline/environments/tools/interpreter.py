"""The built-in tool `python`: it runs one cell after the other in the sandbox, and keeps what they define."""

import asyncio
import json
import signal
import socket
import tempfile
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from trueline.usercode import sandbox
from trueline.usercode.sandbox import ProgramLimits

EPISODE: ContextVar[str] = ContextVar("episode")  # of the call that runs
PROCESSOR_SECONDS = 3600.0  # of all cells of one interpreter; each cell has its own limit by the clock
END_SECONDS = 1.0  # for a process to end that has closed its line
LONGEST_OUTPUT = 10_000  # characters
NO_OUTPUT = "(no output)"
# Cells arrive on a private line; their own standard input is empty.
CELLS = """
import ast, json, linecache, os, sys, traceback
line = os.fdopen(os.dup(0), "r+b", buffering=0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
names = {"__name__": "__main__", "__builtins__": __builtins__}
output = sys.stdout
output.reconfigure(errors="backslashreplace")

def run(text, place):
    linecache.cache[place] = len(text), None, text.splitlines(True), place
    cell = compile(text, place, "exec", ast.PyCF_ONLY_AST)
    last = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, place, "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), place, "eval"), names)
    if value is not None:
        print(repr(value))

def explain(error):
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    print("".join(traceback.format_exception(type(error), error, own, limit=-5)), end="", file=output)

def flush():
    try:
        output.flush()
    except OSError:  # the file is full
        os.ftruncate(1, 2**20)
        os.lseek(1, 0, os.SEEK_END)
        output.flush()

def serve(number=0):
    while True:
        flush()
        line.write(b".")
        number += 1
        sys.stdout = sys.stderr = output
        try:
            run(json.loads(line.readline()), f"cell {number}")
        except BaseException as error:
            flush()
            explain(error)

serve()
"""


class PythonTool:
    """An interpreter for every episode that calls it; the parameters are options."""

    def __init__(
        self, seconds: float = sandbox.CODE_SECONDS, memory_gib: float = 1.0, network: bool = False, files: bool = False
    ) -> None:
        self.limits = ProgramLimits(seconds, memory_gib, network, files, place="environment")
        self.interpreters: dict[str, Interpreter] = {}

    async def python(self, code: str) -> str:
        """Run Python code. Variables, functions and imports are kept for the next calls.

        Args:
            code: The code; what it prints and the value of its last expression come back.
        """
        return await self.interpreters.setdefault(EPISODE.get(), Interpreter(self.limits)).run(code)

    async def close(self, episode: str) -> None:
        if episode in self.interpreters:
            await self.interpreters.pop(episode).close()


class Interpreter:
    """It is started by its first cell, and by the next one after a cell that has ended it."""

    def __init__(self, limits: ProgramLimits) -> None:
        self.limits = limits
        self.turn = asyncio.Lock()
        self.live: InterpreterProcess | None = None

    async def run(self, code: str) -> str:
        """Return what a cell prints, and the value of its last expression or why it failed."""
        async with self.turn:
            process, self.live = self.live or await start_interpreter(self.limits), None
            try:
                ended = await process.run(code, self.limits.seconds)
                if not ended:
                    self.live = process
                return "\n".join(text for text in (process.take_output().strip("\n"), ended) if text) or NO_OUTPUT
            finally:  # also where nobody waits for the cell any more
                if self.live is None:
                    process.end()

    async def close(self) -> None:
        async with self.turn:
            if self.live is not None:
                self.live.end()
            self.live = None


class InterpreterProcess:
    def __init__(self, limits: ProgramLimits) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="trueline-code-", ignore_cleanup_errors=True)
        self.output = tempfile.TemporaryFile(dir=self.folder.name, buffering=0)  # noqa: SIM115  (end closes it)
        program = Path(self.folder.name, "program.py")
        program.write_text(CELLS)
        sandbox.give_to_nobody(self.folder.name, program, self.output.fileno())
        self.line, theirs = socket.socketpair()
        self.line.setblocking(False)
        with theirs:
            streams = theirs.fileno(), self.output, self.output
            self.popen = sandbox.start_confined(program, streams, replace(limits, seconds=PROCESSOR_SECONDS))

    async def run(self, code: str, seconds: float) -> str:
        """Run a cell and return nothing, or how it has ended the interpreter."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_sendall(self.line, json.dumps(code).encode() + b"\n")
                if await self.is_ready():
                    return ""
        except TimeoutError:
            return f"The code took longer than {seconds:g} seconds and was ended; what it had defined is lost."
        except ConnectionError:
            pass
        status = await asyncio.to_thread(sandbox.wait_or_kill, self.popen, END_SECONDS)
        cause = f" by {signal.Signals(-status).name}" if status is not None and status < 0 else ""
        return f"Python was ended{cause}; what the code had defined is lost."

    async def is_ready(self) -> bool:
        return await asyncio.get_running_loop().sock_recv(self.line, 1) != b""

    def take_output(self) -> str:
        """Take what was printed since the last time; the middle of a long text is left out."""
        text = sandbox.text_of(self.output)
        self.output.seek(0)  # for the process too, which has the same place in it
        self.output.truncate()
        left_out, half = len(text) - LONGEST_OUTPUT, LONGEST_OUTPUT // 2
        return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}" if left_out > 0 else text

    def end(self) -> None:
        if self.popen.returncode is None:  # else its number may be another's by now
            sandbox.wait_or_kill(self.popen, 0.0)
        self.line.close()
        self.output.close()
        self.folder.cleanup()


async def start_interpreter(limits: ProgramLimits) -> InterpreterProcess:
    """Start Python, in this thread: the kernel kills it when the thread that started it ends."""
    process, ready = InterpreterProcess(limits), False
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(sandbox.START_SECONDS):
                ready = await process.is_ready()
        if not ready:
            output = process.take_output().strip() or "no sign of it"
            raise RuntimeError(f"Python does not start in the sandbox: {output}")
    finally:
        if not ready:
            process.end()
    return process
