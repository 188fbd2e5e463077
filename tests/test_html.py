"""The page of generations: well-formed, hostile text escaped, colours = depths, text = the decoded text."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eval.html_view import PROMPTS_SHOWN, html_view, printable, shown_prompts, token_spans, tree_svg
from eval.loop import DecodeResult, Round, TreeRecord
from eval.measures import Method, Trial
from eval.prompts import Prompt
from eval.text_view import token_pieces
from eval.tree import TreeShape
from models.tiny import byte_tokenizer

HOSTILE = "</span><script>alert('x')</script> & \"q\" &lt; œ 🙂\n\n\ttab\x00\x1b\x7f\r<|im_end|>"
VOID = {"meta"}


class Page(HTMLParser):
    """What a browser would make of it: tags balanced, text of the tokens, with their classes and titles."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tokens, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes))
            if "title" in attributes:
                self.tokens.append([attributes["class"], attributes["title"], ""])

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and "title" in self.open[-1][1]:
            self.tokens[-1][2] += data


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page.open
    return page


def chain_round(drafted: int, accepted: int) -> Round:
    judged = min(accepted + 1, drafted)
    return Round(drafted=drafted, depth=drafted, judged=judged, accepted=accepted, accepted_uncut=accepted)


def result_of(token_ids: list[int]) -> DecodeResult:
    """Chains of 3 of which 0, 1, 2, 3, 0, ... are accepted, the text's end cutting the last one."""
    depths, rounds, trees = [0], [], []
    while len(depths) < len(token_ids):
        accepted = len(rounds) % 4
        rounds.append(chain_round(3, accepted))
        start = len(depths)
        depths += [*range(1, accepted + 1), 0]
        if len(depths) <= len(token_ids):
            drafted = [*token_ids[start : start + accepted], *[60] * (3 - accepted)]
            own = token_ids[start + accepted]
            trees.append(TreeRecord(token_ids[start - 1], drafted, [-1, 0, 1], list(range(accepted)), own, start))
    return DecodeResult(
        token_ids=token_ids,
        token_depth=depths[: len(token_ids)],
        finish_reason="length",
        rounds=rounds,
        trees=trees[:4],
    )


def ids_of(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize(
    "ids", [ids_of(HOSTILE), list(range(259)), ids_of("🙂")[:3], [*ids_of("🙂")[:2], *ids_of("Aé")]]
)
def test_the_text_is_the_decoded_one_and_colours_are_depths(ids):
    tokenizer = byte_tokenizer()
    result = result_of(ids)
    page = parse(token_spans(tokenizer, result))
    assert "".join(token[2] for token in page.tokens) == printable(tokenizer.decode(result.token_ids))
    assert [int(re.match(r"t d(\d+)", token[0])[1]) for token in page.tokens] == result.token_depth
    assert {tag for tag, _ in page.tags} == {"span"}  # nothing of the text became markup
    for number, (depth, (_, title, _)) in enumerate(zip(result.token_depth, page.tokens), start=1):
        assert title.startswith(f"token {number} ({result.token_ids[number - 1]})")
        assert ("prefill" in title) == (number == 1) and (f"drafted at depth {depth}," in title) == (depth > 0)


def test_titles_tell_the_round_and_kind():
    tokenizer = byte_tokenizer()
    result = result_of(ids_of("abcdefghijklmn"))
    titles = [token[1].partition(": ")[2] for token in parse(token_spans(tokenizer, result)).tokens]
    assert titles[:6] == [
        "the target's own, from the prefill",
        "round 1, the target's own, correction",
        "round 2, drafted at depth 1, accepted",
        "round 2, the target's own, correction",
        "round 3, drafted at depth 1, accepted",
        "round 3, drafted at depth 2, accepted",
    ]
    assert titles[10] == "round 4, the target's own, bonus"
    plain = DecodeResult(
        token_ids=ids_of("ab"), token_depth=[0, 0], finish_reason="length", rounds=[chain_round(0, 0)], trees=[]
    )
    assert parse(token_spans(tokenizer, plain)).tokens[1][1].endswith("round 1, the target's own, plain step")


def test_a_character_of_several_tokens_stands_at_its_last():
    tokenizer = byte_tokenizer()
    ids = tokenizer("aœ🙂")["input_ids"]
    assert token_pieces(tokenizer, ids) == ["a", "", "œ", "", "", "", "🙂"]
    assert token_pieces(tokenizer, ids[:-1]) == ["a", "", "œ", "", "", "\N{REPLACEMENT CHARACTER}"]
    classes = [token[0] for token in parse(token_spans(tokenizer, result_of(ids))).tokens]
    assert [("part" in name) for name in classes] == [False, True, False, True, True, True, False]


TREE = TreeRecord(  # "a" and "<" behind the root, "b" and "c" behind "a"; "a", "c" accepted
    ids_of("\n")[0], tokens=ids_of("a<bc"), parents=[-1, -1, 0, 0], path=[0, 3], next_token=ids_of("&")[0], start=1
)


def nodes_of(svg: str) -> dict[str, tuple[str, str, float, float]]:
    """Label -> (class, title, x, y)."""
    space = "{http://www.w3.org/2000/svg}"
    found = {}
    for group in ElementTree.fromstring(svg).findall(f"{space}g"):
        text = group.find(f"{space}text")
        title = group.find(f"{space}title").text
        found[text.text] = (group.get("class"), title, float(text.get("x")), float(text.get("y")))
    return found


def test_a_tree_is_drawn():
    svg = tree_svg(byte_tokenizer(), TREE)
    nodes = nodes_of(svg)
    classes = {label: node[0] for label, node in nodes.items()}
    assert classes == {
        "↵": "node root", "a": "node on d1", "<": "node off", "b": "node off", "c": "node on d2", "&": "node own",
    }  # fmt: skip
    assert "bonus" in nodes["&"][1] and "not accepted" in nodes["<"][1] and "depth 2, accepted" in nodes["c"][1]
    column = {label: node[2] for label, node in nodes.items()}
    assert column["↵"] < column["a"] == column["<"] < column["b"] == column["c"] < column["&"]
    assert len({node[2:] for node in nodes.values()}) == 6  # none on top of another
    assert svg.count('class="edge on"') == 3 and svg.count('class="edge"') == 2
    correction = tree_svg(byte_tokenizer(), _with_path([0]))
    assert "correction" in nodes_of(correction)["&"][1]
    nothing = nodes_of(tree_svg(byte_tokenizer(), _with_path([])))
    assert nothing["a"][0] == "node off" and nothing["&"][2] == nothing["a"][2]


def _with_path(path: list[int]) -> TreeRecord:
    return replace(TREE, path=path)


def test_boxes_of_a_wide_tree_do_not_overlap():
    parents = [-1] * 4 + [i for i in range(4) for _ in range(5)] + [i for i in range(4, 24) for _ in range(2)]
    tree = TreeRecord(66, list(range(40, 40 + len(parents))), parents, [1, 9, 35], 65, 1)
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(tree_svg(byte_tokenizer(), tree))
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = []
    for group in root.findall(f"{space}g"):
        rect = group.find(f"{space}rect")
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and x + w <= width and y + h <= height
        boxes.append((x, y, w, h))
    assert len(boxes) == len(parents) + 2
    for i, (x, y, w, h) in enumerate(boxes):
        assert not any(x < a + c and a < x + w and y < b + d and b < y + h for a, b, c, d in boxes[:i])


def test_the_whole_page():
    tokenizer = byte_tokenizer()
    ids = tokenizer(HOSTILE)["input_ids"]
    prompts = [Prompt(name, f"{i}<", f"<img src=x> {i}", (1,)) for name in ("gsm8k", "mt<bench") for i in range(3)]
    assert shown_prompts(prompts) == [0, 1, 3, 4] and PROMPTS_SHOWN == 2
    methods = [
        Method(t, name, TreeShape.parse(name), "probabilistic")
        for t in (0.0, 1.0)
        for name in ("chain_k3", "static_2x2")
    ]
    trials = {m: [Trial(p.set_name, p.prompt_id, None, result_of(ids)) for p in prompts] for m in methods}
    html = html_view(tokenizer, prompts, trials, title="a <b> & c")
    ElementTree.fromstring(html)
    page = parse(html)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("article") == 4 and tags.count("details") == 16 and tags.count("figure") == 16 * 3
    assert not {"script", "img", "link", "iframe"} & set(tags)
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href")]
    assert "url(" not in html and "@import" not in html  # nothing from outside
    assert "prefers-color-scheme:dark" in html
    for depth in range(4):
        assert f"--d{depth}:" in html and f".t.d{depth}{{" in html
    assert "alpha 0." in html and html.count("alpha") == 8  # of chains only
    assert html.count("tau ") == 16
