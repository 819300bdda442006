"""Text as tokens: files whose speakers are named, columns of tables, and what a vocabulary is made of."""

import tracemalloc

import numpy as np
import pytest

import jaxfl
from jaxfl.data.readers import absolute, load
from jaxfl.data.vocabulary import UNKNOWN
from jaxfl.errors import JaxflError

PLAY = "ROMEO:\nAy me!\n\nFIRST LADY:\nShe speaks\nto thee.\n\nROMEO:\nO, speak again\n\nand be: bright zz"


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(text, name="play.txt"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_text_is_cut_into_rows_by_speaker(written):
    """Every character but a speaker's first one follows another; the last fifth is for testing.

    What stands before the first speaker is left out.
    """
    source = load(written("The Tragedy\n\n" + PLAY) + ",length=6")
    said = {
        "ROMEO": "Ay me!\nO, speak again\nand be: bright zz",  # the last paragraph begins with no name
        "FIRST LADY": "She speaks\nto thee.",
    }
    for speaker, text in said.items():
        of_speaker = source.columns["client"] == speaker
        rows = ["".join(source.class_names[t] for t in row if t >= 0) for row in source.images[of_speaker]]
        known = "".join(c if c in source.class_names else UNKNOWN for c in text)
        assert rows[0] + "".join(row[1:] for row in rows[1:]) == known
        assert source.train[of_speaker].tolist() == [i < 0.8 * len(rows) for i in range(len(rows))]
    trained = {source.class_names[t] for t in source.images[source.train].ravel() if t >= 0}
    assert {*source.class_names} == {UNKNOWN, *trained} and "z" not in trained  # only where it is tested
    follows = np.where(source.images[:, 1:] >= 0, source.images[:, 1:], -1)
    np.testing.assert_array_equal(source.labels[:, :-1], follows)
    assert (source.labels[:, -1] == -1).all() and source.task.name == "next-token" and source.divided
    assert "client" not in load(written("no names\n\nhere: none", "plain.txt")).columns
    novel = load(written("He wrote to her.\n\n" * 20 + "The letter read:\n\nAdieu.", "novel.txt"))
    assert "client" not in novel.columns and len(novel.labels) > 3  # nothing is left out


ITEMS = [
    f"{i % 2},'{'Stocks fell!' if i % 2 else 'They won, again'}' word{i},{'ab'[i % 2]}" for i in range(20)
]


def test_one_long_text_does_not_make_all_others_as_long(written):
    name = (
        written("t,n\n" + "a b,0\n" * 499 + "a " * 50_000 + ",1\n", "long.csv") + ",text=t,target=n,length=3"
    )
    load(name)  # imports are not meant
    tracemalloc.start()
    assert load(name).images.shape == (500, 3)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50e6  # as an array of words 200 MB


def test_a_column_of_text_becomes_words_of_training_rows(written):
    rows = [f"{row.replace(',', ';', 1).replace(', ', ' ')}".replace(";", ",", 1) for row in ITEMS]
    path = written("\n".join(rows), "news.csv")
    name = f"{path},columns=class+title+desk,text=title,target=class,client=desk"
    source = load(f"{name},length=5")
    assert source.task.name == "classes" and source.classes == 2 and source.images.shape == (20, 5)
    assert (
        source.images.max()
        < source.vocabulary
        == len({*"'!", "stocks", "fell", "they", "won", "again"}) + 16 + 1
    )
    assert (source.images[~source.train] == 0).sum() == 0  # the last word, cut by length
    whole = load(f"{name},length=9")
    ends = (whole.images >= 0).sum(1)
    last = whole.images[np.arange(20), ends - 1]
    assert ((last == 0) == ~whole.train).all()  # a word of its own that no training row has
    assert (source.columns["client"] == np.where(source.labels, "b", "a")).all()
    (again,) = source.encoded(["Stocks FELL, unheard"])
    assert [*map(source.words.__getitem__, again[:4])] == ["stocks", "fell", UNKNOWN, UNKNOWN]
    assert (again[4:] == -1).all() and source.class_names == ("0", "1")
    of_characters = load(
        f"{path},columns=class+title+desk,text=title,without=class,tokens=characters,length=9"
    )
    assert of_characters.task.name == "next-token" and of_characters.images.shape == (20, 9)
    assert of_characters.class_names == of_characters.words
    (again,) = of_characters.encoded(["won"])
    assert "".join(map(of_characters.words.__getitem__, again[:3])) == "won" and (again[3:] == -1).all()
    of_letters = load(written("a,c g a\n" * 9, "dna.csv") + ",columns=class+title,text=title,target=class")
    (again,) = of_letters.encoded(["c a"])  # words of a single letter are words
    assert [*map(of_letters.words.__getitem__, again[:2])] == ["c", "a"]


@pytest.fixture
def tokenizer(tmp_path):
    """Return a tokenizer of pairs of characters, with marks around texts and a gap in its numbers, saved."""
    tokenizers = pytest.importorskip("tokenizers")
    known = ["[UNK]", "[CLS]", "[PAD]", *"abcdefghijklmnopqrstuvwxyz,!' ", "st", "wo", "th", "he"]
    numbers = {piece: number + (number > 5) for number, piece in enumerate(known)}
    pairs = [(a, b) for a, b in ("st", "wo", "th", "he")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, pairs, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    marks = [("[CLS]", numbers["[CLS]"])]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=marks)
    made.enable_padding(pad_id=numbers["[PAD]"], pad_token="[PAD]", length=50)
    made.save(str(tmp_path / "pairs.json"))
    return made


def test_ids_of_a_named_tokenizer_are_the_tokens(written, tokenizer, tmp_path, monkeypatch):
    """Of a table and of a play; they are neither marked, nor padded, nor numbered anew."""
    monkeypatch.chdir(tmp_path)

    def expected(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    tokenizer.no_padding()
    texts = [f"They won{'!' * (i + 1)}" for i in range(10)] + ["What? Stocks"] * 10
    written("\n".join(["title,n", *(f"{text},{i % 2}" for i, text in enumerate(texts))]), "news.csv")
    source = load("news.csv,text=title,target=n,length=9,tokenizer=pairs.json")
    rows = sorted(row[row >= 0].tolist() for row in source.images)
    assert rows == sorted(expected(text)[:9] for text in texts)
    assert source.vocabulary == tokenizer.get_vocab_size() + 1 and source.words[6] == ""  # of no token
    (again,) = source.encoded(["they WON"])
    assert again[again >= 0].tolist() == expected("they won")
    assert [*map(source.words.__getitem__, again[:2])] == ["th", "e"]

    play = load(f"{written(PLAY)},length=6,tokenizer=pairs.json")
    lines = play.images[play.columns["client"] == "FIRST LADY"]
    said = np.concatenate([lines[0], *(line[1:] for line in lines[1:])])
    assert said[said >= 0].tolist() == expected("She speaks\nto thee.")
    assert absolute("play.txt,tokenizer=pairs.json").endswith(f",tokenizer={tmp_path.resolve()}/pairs.json")
    with pytest.raises(JaxflError, match="a file that the package tokenizers does not read"):
        load(f"play.txt,tokenizer={written(PLAY)}")
    with pytest.raises(JaxflError, match="There is no file none.json"):
        load("play.txt,tokenizer=none.json")


@pytest.mark.parametrize(
    ("text", "name", "options", "sentence"),
    [
        ("", "a.txt", "", "a.txt has no text; give it some characters"),
        ("one paragraph", "a.txt", ",length=1", "length=1; a row has at least 2 tokens"),
        ("one paragraph", "a.txt", ",size=1", "size"),
        ("n,t\n1,a b\n2, \n", "a.csv", ",text=t,target=n", "1 of 2 rows have an empty text; leave them out"),
        ("n,t\n1,a b\n2,\n", "a.csv", ",text=t,target=n", r"1 of 2 rows have an empty field \(t\)"),
        (
            "n,t\n1,a\n2,b\n",
            "a.csv",
            ",text=t,without=n",
            "2 of 2 rows have a single token, the first is row 0",
        ),
        ("n,t\n1,a\n2,b\n", "a.csv", ",text=u,target=n", "has no column 'u'"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(text, name, options, sentence, written):
    with pytest.raises(JaxflError, match=sentence):
        load(written(text, name) + options)


def test_roles_learn_to_continue_a_text(written, tmp_path):
    name = written("\n\n".join(f"{who}:\n{word * 30}" for who, word in (("A", "tick "), ("B", "tock "))))
    options = dict(partition="natural,column=client,min_samples=1", models=["gru,width=0.25"], lr=0.5)
    run = jaxfl.run(
        "fedper", dataset=f"{name},length=9", rounds=3, run_dir=str(tmp_path / "run"), quiet=True, **options
    )
    client, rows = run.models[0], run.partition.test[0]
    truth = run.source.labels[rows]
    said = client.predict(run.source.images[rows])
    assert said.shape == truth.shape
    scores = run.result["accuracy"]
    assert scores["token_accuracy_per_client"][0] == pytest.approx((said == truth)[truth >= 0].mean())
    assert client.accuracy == scores["per_client"][0] > 1
