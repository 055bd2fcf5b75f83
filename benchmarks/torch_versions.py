"""What each release of torch makes of attnsel's calls of its attention ops on CUDA, with no GPU.

    python benchmarks/torch_versions.py 2.6.0 2.8.0 --json benchmarks/results/torch-versions.json

Each release is unpacked by pip into a folder of its own, in front of this environment's torch, and runs
``tests/proof/test_cuda_matrix.py``: fake CUDA tensors through the release's schemas and shape functions.
A CUDA build needs its libraries to be imported: some 3 GB to fetch and 6 GB of disk, one release at a time.
Counts and the schemas of the ops are merged into the file by release. Exit code 1 where a test failed, or
no release was to be had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from triton_versions import ROOT, merge, unpacked

RELEASES = ("2.6.0", "2.8.0", "2.10.0", "2.11.0", "2.13.0", "2.15.0")
FUSED = tuple(f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))
OPS = (
    *FUSED,
    *(f"{name}_backward" for name in FUSED),
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
    "_flash_attention_backward",
)


def here() -> dict[str, Any]:
    """The torch that imports here, and the schemas of the ops it has."""
    import torch

    packets = [getattr(torch.ops.aten, name, None) for name in OPS]
    schemas = [str(getattr(p, overload)._schema) for p in packets if p for overload in p.overloads()]
    return {"torch": torch.__version__, "schemas": schemas}


def counts(report: Path) -> tuple[dict[str, int], list[str]]:
    """How many tests of a junit report passed, failed and were skipped, and which failed."""
    cases = list(ET.parse(report).iter("testcase"))
    failed = [c.attrib["name"] for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped}, failed


def run_with(release: str, every: bool) -> tuple[dict[str, Any], list[str]]:
    """The tests in a fresh process that sees this release, and which of them failed.

    Raises RuntimeError where another torch answers, or no test ran.
    """
    test = "tests/proof/test_cuda_matrix.py"
    with unpacked(release, "torch", alone=False) as environment, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--here"]
        answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
        made: dict[str, Any] = json.loads(answer)
        if made["torch"].partition("+")[0] != release:
            raise RuntimeError(f"torch {made['torch']} answered, asked was {release}")
        report = Path(folder, "report.xml")
        options = ["-p", "no:cacheprovider", f"--junitxml={report}", "-k", "" if every else "not every"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, test], env=environment, cwd=ROOT, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"torch {release}: pytest ended with {done.returncode}")
        number, failed = counts(report)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    head = {"build": made["torch"], "date": date, "forms": "all" if every else "some"}
    return {**head, **number, "schemas": made["schemas"]}, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--all", action="store_true", help="every feature in every form: minutes each")
    parser.add_argument("--json", type=Path, help="merge the results into this file")
    parser.add_argument("--here", action="store_true", help="the installed torch's schemas only, to stdout")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(here()))
        return 0
    wrong = ran = 0
    for release in options.releases:
        try:
            made, failed = run_with(release, options.all)
        except subprocess.CalledProcessError as error:
            if "pip" not in error.cmd:
                raise
            print(f"  {release}: pip does not have it here", flush=True)
            continue
        ran += 1
        print(
            f"  {made['build']}: {made['passed']} passed, {made['failed']} failed, {made['skipped']} skipped"
        )
        print("".join(f"    {name}\n" for name in failed), end="", flush=True)
        wrong += len(failed)
        if options.json:
            merge(options.json, release, made, "schemas")
    return int(wrong > 0 or not ran)


if __name__ == "__main__":
    sys.exit(main())
