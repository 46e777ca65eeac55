"""Records a flame graph of every benchmark with py-spy, under light loads: one SVG a script, its servers included."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from run_all import HERE, REAL_PYTHON, REAL_VENV, SCRIPTS

FOLDER = HERE / "flames"
RATE = 200


def recorded(script: str, folder: Path) -> str | None:
    """Records one script into `folder`; why there is no graph, or None."""
    graph = folder / f"{Path(script).stem}.svg"
    graph.unlink(missing_ok=True)
    environment = dict(os.environ)
    if REAL_PYTHON not in environment and REAL_VENV.exists():
        environment[REAL_PYTHON] = str(REAL_VENV)
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if spy is None:
        raise SystemExit('there is no py-spy: pip install -e ".[bench]"')
    command = [spy, "record", "--subprocesses", "--rate", str(RATE), "--format", "flamegraph", "--output", str(graph)]
    command += ["--", sys.executable, str(HERE / script), *SCRIPTS[script].split()]
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = answer.stdout.strip().splitlines() or [f"exit code {answer.returncode}"]
    skipped = next((line for line in lines if line.startswith("skipped: ")), None)
    if skipped is not None:
        graph.unlink(missing_ok=True)
        return skipped
    return None if graph.exists() else lines[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="those to record; default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the graphs go")
    args = parser.parse_args()
    if unknown := [name for name in args.scripts if name not in SCRIPTS]:
        parser.error(f"no such script: {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in args.scripts or SCRIPTS:
        problem = recorded(name, args.folder)
        failed |= problem is not None and not problem.startswith("skipped: ")
        print(f"{name}: {problem or args.folder / (Path(name).stem + '.svg')}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
