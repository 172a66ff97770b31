"""Who takes a signal, behind launchers, shells and inits."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.training.durable.program.programs import started
from tests.training.runs import wait_for
from training.durable.program import signals
from training.durable.program.process import ProgramProcess

SLEEPS = "import time; open('up', 'w'); time.sleep(60)"
HANDLES = f"import signal; signal.signal(signal.SIGTERM, print); {SLEEPS}"
BLOCKS = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})"
AWAITS = f"{BLOCKS}; open('up', 'w'); signal.sigwait({{signal.SIGTERM}})"
IN_A_THREAD = (
    f"{BLOCKS}; import threading; "
    f"threading.Thread(target=signal.sigwait, args=[{{signal.SIGTERM}}]).start(); {SLEEPS}"
)
IN_A_CHILD = (
    f"import os, signal; child = os.fork(); child or exec({f'{BLOCKS}; {SLEEPS}'!r}); os.wait()"
)


def command(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def launcher(start: str, code: str) -> str:
    """A program that starts another one, and then does `start` with it."""
    words = [sys.executable, "-c", code]
    return (
        f"import signal, subprocess as s, time; words = {words}; "
        f"child = s.Popen(words, stdout=s.PIPE); {start}"
    )


# It blocks all, awaits all and passes on what comes, as tini and dumb-init do.
INIT = "every = signal.valid_signals(); signal.pthread_sigmask(2, every); signal.sigwait(every)"
TRAP = "trap 'echo told' TERM;"
RANKS = (
    f"exec {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --no-python"
)
UV = Path(sys.executable).parent / "uv"
with_uv = pytest.mark.skipif(not UV.exists(), reason="needs uv")
# It ends its child when it is told, as DeepSpeed's does with its ranks.
ENDS = "signal.signal(signal.SIGTERM, lambda *_: child.kill()); child.wait()"


def deepspeed(code: str) -> str:
    """DeepSpeed's launcher, as it is called on each host."""
    place = "deepspeed/launcher"
    write = f"mkdir -p {place}; echo {shlex.quote(launcher(ENDS, code))} > {place}/launch.py"
    return f"{write}; exec {sys.executable} -m deepspeed.launcher.launch --world_info=x train.py"


def runner(name: str, code: str) -> str:
    """A runner of tasks that ends them when it is told, as poe does, or leaves them, as just."""
    text = f"#!{sys.executable}\n{launcher(ENDS, code)}"
    return f"echo {shlex.quote(text)} > {name}; chmod +x {name}; exec ./{name} train"


def make(code: str) -> str:
    """Make ends what it runs when it is told."""
    recipe = command(code).replace("$", "$$")
    return f"printf 'all:\\n\\t%s\\n' {shlex.quote(recipe)} > Makefile; exec make"


@pytest.mark.parametrize(
    ("words", "handlers"),
    [
        pytest.param(command(HANDLES), ["first"], id="a handler"),
        pytest.param(command(SLEEPS), [], id="no handler"),
        pytest.param(command(AWAITS), ["first"], id="sigwait"),
        pytest.param(command(IN_A_THREAD), ["first"], id="sigwait in a thread"),
        pytest.param(command(IN_A_CHILD), ["child"], id="blocked in a fork"),
        pytest.param(f"env A=1 {command(HANDLES)}", ["first"], id="env"),
        pytest.param(f"timeout 60 {command(HANDLES)}", ["child"], id="timeout"),
        pytest.param(f"timeout 60 {command(SLEEPS)}", [], id="timeout, no handler"),
        pytest.param(f"({command(HANDLES)}; :); echo", ["child"], id="shell"),
        pytest.param(f"{command(HANDLES)} | cat; echo", ["child"], id="pipe"),
        pytest.param(f"{TRAP} {command(HANDLES)}; echo", ["first", "child"], id="trap that waits"),
        pytest.param(f"{TRAP} {command(HANDLES)} & wait; echo", ["first"], id="trap at once"),
        pytest.param(command(launcher("child.wait()", HANDLES)), ["child"], id="launcher"),
        pytest.param(command(launcher("child.stdout.read()", HANDLES)), ["child"], id="reader"),
        pytest.param(command(launcher(INIT, HANDLES)), ["child"], id="init"),
        pytest.param(command(launcher(INIT, SLEEPS)), [], id="init, no handler"),
        pytest.param(f"{RANKS} {command(HANDLES)}", ["child", "child"], id="torchrun"),
        pytest.param(f"{RANKS} {command(SLEEPS)}", [], id="torchrun, no handler"),
        pytest.param(
            f"exec {UV} run --no-project --offline {command(HANDLES)}",
            ["child"],
            id="uv",
            marks=with_uv,
        ),
        pytest.param(
            f"exec {UV} run --no-project --offline {command(SLEEPS)}",
            [],
            id="uv, no handler",
            marks=with_uv,
        ),
        pytest.param(deepspeed(HANDLES), ["child"], id="deepspeed"),
        pytest.param(deepspeed(SLEEPS), [], id="deepspeed, no handler"),
        pytest.param(make(HANDLES), ["child"], id="make"),
        pytest.param(make(SLEEPS), [], id="make, no handler"),
        pytest.param(runner("poe", HANDLES), ["child"], id="poe"),
        pytest.param(runner("poe", SLEEPS), [], id="poe, no handler"),
        # A loader's worker handles it, too, and so does a tracker's service.
        pytest.param(command(launcher("time.sleep(60)", HANDLES)), [], id="trainer with a child"),
    ],
)
def test_a_signal_is_for_whoever_takes_it(words: str, handlers: list[str], tmp_path: Path) -> None:
    def found(process: ProgramProcess) -> list[str]:
        pids = process.takers(signal.SIGTERM) or []
        return ["first" if pid == process.pid else "child" for pid in pids]

    with started("bash", "-c", words, folder=tmp_path) as process:
        wait_for((tmp_path / "up").exists)
        settled = [found(process)]

        def is_settled() -> bool:
            assert process.wait(0.0) is None
            settled.append(found(process))
            return settled[-8:] == [handlers] * 8

        wait_for(is_settled)


def test_what_stands_between_mpiexec_and_its_ranks_is_passed_over() -> None:
    """MPICH's proxy catches SIGTERM and drops it; no package that we have brings one."""
    for name in ("mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "honcho"):
        assert signals._LAUNCHER.search(f"{name}\n{name}\0--control-port\0")
    assert not signals._LAUNCHER.search("python\npython\0mpiexec.py\0")
    assert signals._LAUNCHER.search("task\n/usr/bin/task\0train\0")
    assert not signals._LAUNCHER.search("task\npython\0./task\0"), "a trainer of that name"


def test_a_program_that_its_first_process_has_left_is_told(tmp_path: Path) -> None:
    with started("sh", "-c", f"{command(HANDLES)} & :", folder=tmp_path) as process:
        wait_for(lambda: process.wait(0.1) is None and process.left_code == 0)
        wait_for(lambda: bool(process.takers(signal.SIGTERM)))
        assert process.takers(signal.SIGTERM) == process.tops != [process.pid]
        assert os.getpid() not in process.tops
