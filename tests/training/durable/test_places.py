"""Folders are read as the splits and classes that their names say; two readings are refused."""

from pathlib import Path

import pytest

from contract.errors import UserError
from training.durable.sources import SourceFile, class_names, places_of, splits_of


def read(*folders: str) -> tuple[set[tuple[str | None, str | None]], str]:
    """The classes and splits of two images in each folder, and the doubt about them."""
    places = list(places_of(f"{folder}/{n}.jpg" for folder in folders for n in range(2)))
    assert len(places) == 2 * len(folders)
    (doubt,) = {doubt for *_, doubt in places}
    return {(label, split) for _, label, split, _ in places}, doubt


def test_splits_have_the_names_that_public_datasets_give_them() -> None:
    names = {
        "train": "Training TRAIN train2017 training_set TrainingSet train_images trn",
        "validation": "Val VALID validation val_data Dev development ValSet",
        "test": "Testing test Test_Set evaluation eval holdout Hold-Out held_out test-images",
    }
    for split, text in names.items():
        assert splits_of(text.split()) == dict.fromkeys(text.split(), split)
    others = "trains contest validator images data tested trainval train_station cat set"
    assert splits_of(others.split()) == {}


TRAIN = {("a", "train"), ("b", "train")}


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ("Training/a Training/b Testing/a", TRAIN | {("a", "test")}),
        ("train/a train/b Val/b", TRAIN | {("b", "validation")}),
        ("data/brain/Training/a data/brain/Training/b", TRAIN),
        ("train/train/a train/train/b test/test", TRAIN | {(None, "test")}),
        ("a/train b/train a/TEST", TRAIN | {("a", "test")}),
        ("train/a/images train/b/images val/images", TRAIN | {(None, "validation")}),
        ("train/a/a train/b/b", TRAIN),
        (
            "training_data/train/a training_data/train/b training_data/dev/a",
            TRAIN | {("a", "validation")},
        ),
        ("train bus car", {("train", None), ("bus", None), ("car", None)}),
        ("dev_kit test_board pen", {("dev_kit", None), ("test_board", None), ("pen", None)}),
        ("passed_test failed_test", {("passed_test", None), ("failed_test", None)}),
        (
            "train/train train/bus test/train",
            {("train", "train"), ("bus", "train"), ("train", "test")},
        ),
        ("images/a images/b", {("a", None), ("b", None)}),
        ("a b/images", {("a", None), ("b", None)}),
    ],
)
def test_a_layout_is_its_classes_and_splits(
    folders: str, expected: set[tuple[str | None, str | None]]
) -> None:
    assert read(*folders.split()) == (expected, "")


@pytest.mark.parametrize(
    ("folders", "readings"),
    [
        ("train/a train/b extra/a extra/b", ("folders extra, train may be", "rename 'train'")),
        ("train/a val/a dev/a", ("folders dev, train, val may be", "if they are, name each")),
        ("train test bus", ("folders bus, test, train may be", "rename 'test'")),
        (
            "seg_train/seg_train/a seg_train/seg_train/b seg_pred/seg_pred",
            ("if they are", "rename"),
        ),
        ("trainA trainB testA testB", ("folders testA, testB, trainA, trainB may be", "rename")),
        ("seg_train seg_test", ("if they are, name", "if they are classes, rename 'seg_test'")),
        ("animals/cat animals/dog cars/vw", ("if 'animals' is a class", "if 'cat' is one")),
        ("a b b/more", ("if 'b' is a class, move all", "if 'more' is one, move it")),
        ("a/train a/test b", ("the folder 'a' holds the folder 'test'", "or list file")),
        ("2019/train/a 2020/train/b", ("if '2019' is a class", "if 'a' is one")),
    ],
)
def test_fails_for_a_layout_with_two_readings(folders: str, readings: tuple[str, ...]) -> None:
    _, doubt = read(*folders.split())
    assert all(reading in doubt for reading in readings)
    file = SourceFile(name="x", folder=Path(), label="a", split=None, doubt=doubt)
    with pytest.raises(UserError, match="or list file, class and split in a CSV"):
        class_names([file])


def test_what_lies_beside_splits_and_classes_is_no_sample_but_text_is() -> None:
    images = ["set/train/a/1.jpg", "set/test/a/1.jpg", "set/train/a/a_boxes.txt"]
    beside = ["README.md", "set/words.txt", "docs/licence.txt", "set/best.h5", "set/LICENSE"]
    beside += ["", "set/", "set/train/", "set/train/a/"]
    found = list(places_of([*images, *beside]))
    assert [name for name, *_ in found] == images
    classes = places_of(["Licence.docx", "PetImages/Cat/1.jpg", "PetImages/Dog/1.jpg"])
    assert [label for _, label, *_ in classes] == [None, "Cat", "Dog"]
    text = ["train/1.txt", "val/2.txt", "3.txt"]
    assert [split for *_, split, _ in places_of(text)] == ["train", "validation", None]
