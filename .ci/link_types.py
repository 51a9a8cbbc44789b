"""Links the package together for type checkers: ``python3 .ci/link_types.py [SITE_PACKAGES]``.

mypy and pyright can follow neither [tool.setuptools.package-dir] nor the import hook of an editable
installation. They read ``sys.path``, so ``build/types`` is put on it, in the environment with these
SITE_PACKAGES. Imports still take the import hook, which is moved to the front.
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"
PACKAGES = ("lang", "grammar", "runtime", "radix", "kernels")
HOOK_FIRST = "import sys; sys.meta_path.sort(key=lambda finder: '__editable__' not in str(finder))"


def link_types() -> None:
    """Make `TREE` anew: a link for each file in ramify/, and for each of the other folders."""
    package = TREE / "ramify"
    shutil.rmtree(TREE, ignore_errors=True)
    package.mkdir(parents=True)
    for source in [*(ROOT / "ramify").iterdir(), *(ROOT / name for name in PACKAGES)]:
        (package / source.name).symlink_to(source)


def show_types(site_packages: Path) -> None:
    """Let the checkers of an environment with an editable installation find the package."""
    (site_packages / "ramify_types.pth").write_text(f"{TREE}\n{HOOK_FIRST}\n")


if __name__ == "__main__":
    link_types()
    for folder in sys.argv[1:]:
        show_types(Path(folder))
