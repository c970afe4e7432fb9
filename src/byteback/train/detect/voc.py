# SPDX-License-Identifier: Apache-2.0
"""voc:PATH, the layout of PASCAL VOC:

    PATH/JPEGImages/NAME.jpg     PATH/Annotations/NAME.xml     PATH/ImageSets/Main/{trainval,train,val,test}.txt

PATH may also be the parent folder of these. Uses the splits trainval and test if both exist, or else train and test or val. The
classes are the lines of PATH/classes.txt, or the twenty classes of VOC if no other occurs, or those of the training images.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from byteback.train.checkpoints import files
from byteback.train.detect.annotations import Box, Checks, Picture, Split, existing

_PARTS = ("JPEGImages", "Annotations", "ImageSets/Main")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog", "horse"),
    *("motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def load(path: Path) -> tuple[Split, Split]:
    """Reads the training and the test split."""
    root = _root(path)
    lists = [_names(root, split) for split in _chosen(root)]
    trees = {name: _tree(root / "Annotations" / f"{name}.xml") for names in lists for name in names}
    classes = _classes(root, [trees[name] for name in lists[0]])
    checks = Checks(f"voc:{path}", classes)
    train, test = ([_picture(root, name, trees[name], checks) for name in names] for names in lists)
    checks.finish()
    return Split(train, classes), Split(test, classes)


def _root(path: Path) -> Path:
    """Returns `path`, or the only folder in it that has the layout."""
    inside = [path] + (sorted(folder for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else [])
    found = [folder for folder in inside if all((folder / part).is_dir() for part in _PARTS)]
    if len(found) != 1:
        what = "there is no folder" if not found else f"{len(found)} folders inside it have"
        raise ValueError(f"voc:{path}: {what} with {', '.join(_PARTS)}. Give the folder that contains these three.")
    return found[0]


def _chosen(root: Path) -> tuple[str, str]:
    there = {file.stem for file in (root / "ImageSets" / "Main").glob("*.txt")}
    for pair in (("trainval", "test"), ("train", "test"), ("train", "val")):
        if there.issuperset(pair):
            return pair
    raise ValueError(f"voc:{root}: ImageSets/Main has no train.txt with a val.txt or test.txt; both splits are required.")


def _names(root: Path, split: str) -> list[str]:
    file = root / "ImageSets" / "Main" / f"{split}.txt"
    names = [line.split()[0] for line in files.read_text(file).splitlines() if line.strip()]
    if not names:
        raise ValueError(f"{file}: it lists no image.")
    return names


def _tree(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(file).getroot()
    except FileNotFoundError as error:
        raise ValueError(f"{file}: the annotation is missing, but its image is in a split. Add it.") from error
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last two: of an encoding
        raise ValueError(f"{file}: this is not XML: {error}. Correct it.") from error


def _classes(root: Path, training: list[ElementTree.Element]) -> list[str]:
    file = root / "classes.txt"
    if file.is_file():
        return [line.strip() for line in files.read_text(file).splitlines() if line.strip()]
    found = {entry.findtext("name", "").strip() for tree in training for entry in tree.iter("object")} - {""}
    return list(VOC_CLASSES) if found <= set(VOC_CLASSES) else sorted(found)


def _picture(root: Path, name: str, tree: ElementTree.Element, checks: Checks) -> Picture:
    file = root / "Annotations" / f"{name}.xml"
    image = existing(root / "JPEGImages" / (tree.findtext("filename", "").strip() or f"{name}.jpg"), str(file))
    try:
        width, height = (int(tree.findtext(f"size/{side}", "")) for side in ("width", "height"))
    except ValueError as error:
        raise ValueError(f"{file}: there is no <size> with integer <width> and <height>. Correct it.") from error
    picture = Picture(image, width, height)
    for number, entry in enumerate(tree.iter("object"), 1):
        label = entry.findtext("name", "").strip()
        where = f"{file}, object {number} ({label})"
        if not label:
            raise ValueError(f"{file}, object {number}: there is no <name>, so its class is unknown. Correct the annotation.")
        checks.add(picture, where, label, _box(entry, where))
    return picture


def _box(entry: ElementTree.Element, where: str) -> Box:
    texts = [entry.findtext(f"bndbox/{corner}", "") for corner in _CORNERS]
    try:
        x1, y1, x2, y2 = map(float, texts)
    except ValueError as error:
        raise ValueError(f"{where}: <bndbox> has {texts}, not four numbers {', '.join(_CORNERS)}. Correct it.") from error
    return x1, y1, x2, y2
