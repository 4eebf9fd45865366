"""What memory is left, from files as Linux has them."""

from __future__ import annotations

import pytest

from prep.models.device.host import available

MIB = 1 << 20


def system(root, groups, inside="/a/b"):
    """A system with 8 GiB available and 1 GiB of swap; `groups`: the files of each control group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n")
    (root / "proc/self/cgroup").write_text(f"0::{inside}\n")
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for key, text in files.items():
            (folder / f"memory.{key}").write_text(text)
    return root


@pytest.mark.parametrize(("groups", "mebibytes"), [
    ({}, 9216),
    ({"a/b": {"max": "max\n", "current": "5\n"}}, 9216),
    ({"a/b": {"max": f"{3000 * MIB}\n", "current": f"{1000 * MIB}\n"}}, 2000 + 1024),
    ({"a/b": {"max": f"{3000 * MIB}\n", "current": f"{1000 * MIB}\n", "swap.max": "0\n",
              "stat": f"anon 7\nactive_file {100 * MIB}\ninactive_file {200 * MIB}\n"}}, 2300),
    ({"a": {"max": f"{500 * MIB}\n", "current": f"{400 * MIB}\n", "swap.max": "0\n"},
      "a/b": {"max": f"{3000 * MIB}\n", "current": "0\n"}}, 100),
    ({"": {"max": f"{70 * MIB}\n", "current": f"{80 * MIB}\n", "swap.max": "0\n"}}, 0)])
def test_the_least_of_the_computer_and_its_groups(tmp_path, groups, mebibytes):
    assert available(system(tmp_path, groups)) == mebibytes * MIB


def test_a_system_that_does_not_say(tmp_path):
    assert available(tmp_path) is None
