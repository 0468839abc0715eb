"""What the documentation says is true: its code runs, its recipes work, its pages are current."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jali
import pytest
import torch
from jali import masks

ROOT = Path(__file__).resolve().parents[2]
HACKING = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.M | re.S)


def test_readme_examples_run(tmp_path, monkeypatch):
    code = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    assert len(code) >= 8
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {}
    for n, block in enumerate(code):
        exec(compile(block, f"README.md, block {n + 1}", "exec"), scope)
    assert (tmp_path / "out" / "mask.png").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "python").glob("*.py")), ids=str)
def test_examples_run(path, tmp_path):
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for claim in re.findall(r"difference: (\S+)", done.stdout):
        assert float(claim) < 1e-4
    assert "same cells: False" not in done.stdout


def test_every_file_that_the_documentation_names_exists():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r'\]\(([^)#]+)\)|src="([^"]+)"', page.read_text(encoding="utf-8")):
            link = next(filter(None, target))
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} names {link}"


def test_gallery_of_masks_is_up_to_date():
    scope = {"__file__": str(ROOT / "docs" / "make_masks.py"), "__name__": "make_masks"}
    source = (ROOT / "docs" / "make_masks.py").read_text(encoding="utf-8")
    exec(compile(source, scope["__file__"], "exec"), scope)
    page = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
    assert scope["text"]() == page, "run: python docs/make_masks.py"
    hidden = {"BlockCsrMask"}  # made by BlockSparseMask.from_csr
    public = {
        name
        for name in masks.__all__
        if name.endswith("Mask") and name not in hidden | {"Mask", "AndMask", "OrMask", "NotMask"}
    }
    assert public - {"LeafMask", "DerivedMask"} == set(scope["SECTIONS"])


CHECK = """
// Every tile of a leaf against its cells, over offsets and odd lengths.
#include <cstdio>
#include <initializer_list>
#include "mask/leaf/chunk.h"

int main() {
  using namespace jali;
  long tiles = 0, sharp = 0;
  for (i32 size = 1; size <= 40; size += 3)
    for (i32 offset : {-37, 0, 5, 64}) {
      leaf::Chunk leaf;
      leaf.size.value = size;
      leaf.size.given = 1;
      if (leaf.valid(50, 70)) return 2;
      Frame f;
      f.num_rows = 50;
      f.num_keys = 70;
      f.q_offset = offset;
      for (i32 i0 = 0; i0 < 50; i0 += 7)
        for (i32 j0 = 0; j0 < 70; j0 += 9) {
          i32 i1 = min_of(i0 + 7, 50), j1 = min_of(j0 + 9, 70);
          auto r = leaf.rows(f, i0, i1);
          auto c = leaf.cols(f, j0, j1);
          Span keys = leaf.key_span(f, r), rows = leaf.row_span(f, c);
          bool any = false, all = true;
          for (i32 i = i0; i < i1; ++i)
            for (i32 j = j0; j < j1; ++j) {
              bool x = leaf.visible(leaf.row(f, i), leaf.col(f, j));
              bool meant = floor_div(i + offset, size) == j / size;
              if (x != meant) return 3;
              if (x && (j < keys.begin || j >= keys.end)) return 4;
              if (x && (i < rows.begin || i >= rows.end)) return 4;
              any |= x;
              all &= x;
            }
          Tile t = leaf.classify(f, r, c);
          if ((t == Tile::kEmpty && any) || (t == Tile::kFull && !all)) return 5;
          ++tiles;
          sharp += t == tile_of(!any, all);
        }
    }
  leaf::Chunk wrong;
  if (!wrong.valid(1, 1)) return 6;
  std::printf("%ld tiles, %ld exact\\n", tiles, sharp);
  return sharp * 10 < tiles * 9;
}
"""


def test_leaf_recipe_compiles_and_is_sound(tmp_path):
    (leaf,) = [b for b in blocks(HACKING, "c++") if "namespace jali::leaf" in b]
    folder = tmp_path / "mask" / "leaf"
    folder.mkdir(parents=True)
    (folder / "chunk.h").write_text(leaf)
    (tmp_path / "check.cpp").write_text(CHECK)
    program = tmp_path / "check"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-I", tmp_path, "-I", ROOT / "src"]
    subprocess.run([compiler, *flags, tmp_path / "check.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout)
    assert int(done.stdout.split()[0]) > 3000


def test_python_class_of_the_leaf_recipe():
    (code,) = [b for b in blocks(HACKING, "python") if "class ChunkMask" in b]
    scope = dict(vars(jali._position_masks))
    exec(code, scope)
    chunk = scope["ChunkMask"]
    assert chunk(7).flatten() == ([jali._mask.leaf_kind("chunk"), 1, 1], [], [7])
    assert repr(chunk(7)) == "ChunkMask(size=7)"
    with pytest.raises(ValueError, match="size"):
        chunk(0)
