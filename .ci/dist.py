"""Builds the wheel and the sdist, twice in different folders, and looks at what came out.

Both builds must be equal byte by byte, hold what is under version control and nothing else, and pass `twine check`.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {"lmcache_stream", "tests", "examples", "benchmarks", "Makefile", ".ci"}
ADDED = {"PKG-INFO"}
LEFT_OUT = {"benchmarks/quality.json"}  # megabytes of samples
ALWAYS = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", ".gitignore"}


def build(source: Path, out: Path) -> list[Path]:
    """Build both with the hatchling that is installed; returns the wheel and the sdist."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct").strip()
    run("build", "--no-isolation", "--outdir", str(out), str(source), env={**os.environ, "SOURCE_DATE_EPOCH": epoch})
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return [wheel, sdist]


def copy(names: set[str], target: Path) -> None:
    """Copy files of the checkout, so that whoever works in it changes nothing between two builds."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def run(module: str, *words: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stdout}{done.stderr}")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def tracked() -> set[str]:
    """Files under version control, or about to be."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return {name for name in names if (ROOT / name).is_file()}


def check_wheel(wheel: Path, known: set[str]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    wanted = {name for name in known if name.startswith("lmcache_stream/")}
    same(own, wanted, wheel.name)
    metadata = {PurePosixPath(name).name for name in names - own}
    same(metadata, {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"}, f"the metadata of {wheel.name}")


def check_sdist(sdist: Path, known: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert all(member.isfile() for member in members), "the sdist holds links or devices"
    wanted = {name for name in known if name.partition("/")[0] in SHIPPED} - LEFT_OUT | ALWAYS | ADDED
    same(names, wanted, sdist.name)


def same(found: set[str], wanted: set[str], where: str) -> None:
    if found != wanted:
        raise SystemExit(f"{where}: missing {sorted(wanted - found)}, not wanted {sorted(found - wanted)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the wheel and the sdist")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in [*options.out.glob("*.whl"), *options.out.glob("*.tar.gz")]:
        old.unlink()
    known = tracked()
    with tempfile.TemporaryDirectory() as scratch:
        one, other, again = (Path(scratch, name) for name in ("one", "other", "again"))
        copy(known, one)
        shutil.copytree(one, other)
        files = build(one, options.out)
        for first, second in zip(files, build(other, again), strict=True):
            if not filecmp.cmp(first, second, shallow=False):
                raise SystemExit(f"two builds of {first.name} differ")
    check_wheel(files[0], known)
    check_sdist(files[1], known)
    run("twine", "check", "--strict", *map(str, files))
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes, built twice alike")


if __name__ == "__main__":
    main()
