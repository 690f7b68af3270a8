"""`lockstep run` on this machine."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lockstep.launch.guardian import Guard
from lockstep.launch.output import Output
from lockstep.launch.patience import Patience
from lockstep.launch.rank_process import Pipes, RankProcess
from lockstep.launch.shares import place_of_each
from lockstep.launch.supervision import STOP_WITHIN, Group, run_with_restarts, stop_signals


def run_here(
    command: list[str],
    devices: list[dict[str, str]],
    restarts: int = 0,
    patience: Patience | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run a command in several processes, and again after a failure.

    Args:
        command: The program and its arguments.
        devices: For each process, the variables that give it its devices.
        restarts: How many times all processes may start again.
        patience: How long a process may stand still, `None` for ever.
        environ: The environment, `os.environ` if left out.

    Returns:
        The exit status: 0, that of the process that failed first, or 128 and the number of the
        signal that stopped the run.
    """
    given = dict(os.environ if environ is None else environ)
    given.pop("LOCKSTEP_JOINED", None)
    with tempfile.TemporaryDirectory(prefix="lockstep-run-") as folder, stop_signals() as stops:
        guard = Guard(STOP_WITHIN, folder)

        def start(attempt: int) -> Group:
            variables = [
                {**given, **mine, **place, "PYTHONUNBUFFERED": "1"}
                for mine, place in zip(devices, place_of_each(len(devices)), strict=True)
            ]
            return _LocalGroup(command, variables, Path(folder) / str(attempt), guard)

        try:
            return run_with_restarts(start, command[1], restarts, patience, stops).status
        finally:
            guard.close()


class _LocalGroup(Group):
    """The processes of one attempt, on this machine."""

    def __init__(
        self, command: list[str], variables: list[dict[str, str]], folder: Path, guard: Guard
    ) -> None:
        folder.mkdir()
        self._guard = guard
        self._pipes = Pipes()
        self.ranks: list[RankProcess] = []
        for number, mine in enumerate(variables):
            # The first process writes to the terminal, as without a launcher.
            out = Output(number, sys.stdout) if number else None
            error = Output(number, sys.stderr)
            rank = RankProcess(number, command, mine, folder / f"{number}.json", out, error)
            guard.add(rank.process.pid)
            self.ranks.append(rank)
            self._pipes.add(rank)

    def pass_on(self, seconds: float) -> None:
        """Wait this long for output of the processes, and show what is there."""
        self._pipes.pass_on(seconds)

    def close(self) -> None:
        """Show the rest of the output, and reap the processes."""
        self._pipes.drain()
        self._pipes.close()
        for rank in self.ranks:
            rank.process.wait()
            self._guard.remove(rank.process.pid)
            for pipe, sink in rank.sinks.items():
                sink.close()
                pipe.close()
