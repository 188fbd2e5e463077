"""One page to read in a browser: every token in the colour of who produced it, and drawings of the first draft trees.

1. the first prompts of each set, decoded by each method: a token's colour is the depth at which it was drafted
2. the first rounds of each text as trees: root, drafted nodes, the accepted path, the target's own token behind it

The page needs nothing from outside. It is well-formed XML too.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape

from transformers import PreTrainedTokenizerBase

from eval.loop import DecodeResult, TreeRecord
from eval.measures import Method, Trial
from eval.prompts import Prompt
from eval.text_view import acceptance, printable, token_pieces
from models.errors import UserError

PROMPTS_SHOWN = 2  # of each set
ROUNDS_DRAWN = 3  # of each text
PROMPT_CHARS = 600
LABEL_CHARS = 14  # of a token in a drawing
CHAR_WIDTH, ROW_HEIGHT, BOX_HEIGHT, COLUMN_GAP = 7.3, 23, 18, 30  # of a drawing, in px


def shown_prompts(prompts: Sequence[Prompt]) -> list[int]:
    """Indices of the prompts that the page shows: the first of each set."""
    sets = [prompt.set_name for prompt in prompts]
    return [i for i, name in enumerate(sets) if sets[:i].count(name) < PROMPTS_SHOWN]


def html_view(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    trials: Mapping[Method, Sequence[Trial]],  # trials in the order of prompts
    *,
    title: str,
) -> str:
    """The whole page. title: "DRAFT for TARGET"."""
    shown = shown_prompts(prompts)
    deepest = max((max(of_method[i].ours.token_depth) for of_method in trials.values() for i in shown), default=0)
    deepest = max([deepest, 1, *(method.shape.depth for method in trials)])
    body, last_set = [], None
    for i in shown:
        prompt = prompts[i]
        if prompt.set_name != last_set:
            body.append(f"<h2>{_text(prompt.set_name)}</h2>")
            last_set = prompt.set_name
        words = prompt.text if len(prompt.text) <= PROMPT_CHARS else prompt.text[:PROMPT_CHARS] + " …"
        body.append(f'<article><h3>prompt {_text(prompt.prompt_id)}</h3><div class="prompt">{_text(words)}</div>')
        for number, (method, of_method) in enumerate(trials.items()):
            body.append(_generation(tokenizer, method, of_method[i], is_open=number == 0))
        body.append("</article>")
    return _PAGE.format(
        title=_text(title),
        style=page_style(deepest),
        legend=_legend(deepest),
        body="\n".join(body),
        rounds=ROUNDS_DRAWN,
    )


def page_parts(page: str) -> tuple[str, str]:
    """Style and content of a page that `html_view` made, for a larger page that holds it. UserError when it is none."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    content = page.partition("</h1>")[2].rpartition("</body>")[0]
    if not (style and content):
        raise UserError("generations.html: no page of generations; move it away, or run eval.decode again")
    return style, content.strip()


def token_spans(tokenizer: PreTrainedTokenizerBase, result: DecodeResult) -> str:
    """The text, a span for each token. Class d0 is the target's own, d1, d2, ... the depth at which it was drafted."""
    spans = []
    pieces = token_pieces(tokenizer, result.token_ids)
    for i, (piece, depth, origin) in enumerate(zip(pieces, result.token_depth, _origins(result))):
        classes = f"t d{depth}" + (" nl" if piece.endswith("\n") else "") + (" part" if not piece else "")
        name = f"token {i + 1} ({result.token_ids[i]})" + (", part of a character" if not piece else "")
        spans.append(f'<span class="{classes}" title="{name}: {origin}">{_text(piece)}</span>')
    return "".join(spans)


def tree_svg(tokenizer: PreTrainedTokenizerBase, tree: TreeRecord) -> str:
    """The tree of one round, root on the left. Filled: accepted, in the colour of its depth; the token that the target
    put behind the accepted path has a double frame; the rest was rejected or never looked at."""
    own = len(tree.tokens)  # the number of the target's own token, behind those of the nodes; the root is -1
    parents = {node: parent for node, parent in enumerate([*tree.parents, _path_end(tree)])}
    children: dict[int, list[int]] = {node: [] for node in range(-1, own + 1)}
    depth = {-1: 0}
    for node, parent in parents.items():  # parents stand before their children
        children[parent].append(node)
        depth[node] = depth[parent] + 1
    tokens = {-1: tree.root, **dict(enumerate(tree.tokens)), own: tree.next_token}
    labels = {node: _label(tokenizer, token) for node, token in tokens.items()}
    box = {node: _width(label) + 12 for node, label in labels.items()}
    kept = {-1, *tree.path, own}

    rows = _rows(children)
    left = [4.0]
    for level in range(max(depth.values()) + 1):
        left.append(left[-1] + max(box[node] for node in box if depth[node] == level) + COLUMN_GAP)
    width, height = left[-1] - COLUMN_GAP + 4, (max(rows.values()) + 1) * ROW_HEIGHT + 4
    x = {node: left[depth[node]] for node in box}
    y = {node: 2 + (rows[node] + 0.5) * ROW_HEIGHT for node in box}

    edges, boxes = [], []
    for node in sorted(box, key=lambda node: node in kept):  # what was kept is drawn on top
        if node == -1:
            classes, told = "root", "root: committed before this round"
        elif node == own:
            classes, told = "own", f"the target's own: {_own_kind(tree)}"
        elif node in kept:
            classes, told = f"on d{depth[node]}", f"drafted at depth {depth[node]}, accepted"
        else:
            classes, told = "off", f"drafted at depth {depth[node]}, not accepted"
        if node in parents:
            x0, y0 = x[parents[node]] + box[parents[node]], y[parents[node]]
            dx, dy = x[node] - x0, y[node] - y0
            edge = "edge on" if node in kept else "edge"
            curve = f"M{x0:.1f} {y0:.1f}c{dx / 2:.1f} 0 {dx / 2:.1f} {dy:.1f} {dx:.1f} {dy:.1f}"
            edges.append(f'<path class="{edge}" d="{curve}" />')
        frames = _rect(x[node], y[node], box[node], BOX_HEIGHT)
        if node == own:
            frames += _rect(x[node] + 2.5, y[node], box[node] - 5, BOX_HEIGHT - 5)
        boxes.append(
            f'<g class="node {classes}"><title>{told}, token {tokens[node]}</title>{frames}'
            f'<text x="{x[node] + 6:.1f}" y="{y[node] + 4:.1f}">{_text(labels[node])}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="draft tree, {_told(tree)}" '
        f'width="{width:.0f}" height="{height:.0f}">{"".join(edges)}{"".join(boxes)}</svg>'
    )


def _path_end(tree: TreeRecord) -> int:
    """The node behind which the target's own token stands; -1 the root."""
    return tree.path[-1] if tree.path else -1


def _own_kind(tree: TreeRecord) -> str:
    return "correction" if _path_end(tree) in tree.parents else "bonus"


def _told(tree: TreeRecord) -> str:
    return f"{len(tree.tokens)} drafted, {len(tree.path)} accepted, then the target’s {_own_kind(tree)}"


def _rows(children: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Leaves one below the other, every other node in the middle of its children."""
    rows: dict[int, float] = {}
    num_leaves = 0
    stack = [-1]
    while stack:
        node = stack[-1]
        waiting = [child for child in children[node] if child not in rows]
        if waiting:
            stack.append(waiting[0])
            continue
        stack.pop()
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
        else:
            rows[node] = num_leaves
            num_leaves += 1
    return rows


def _rect(x: float, middle: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" y="{middle - height / 2:.1f}" width="{width:.1f}" height="{height}" rx="4" />'


def _text(text: str) -> str:
    return escape(printable(text), quote=True)


def _label(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """A token in a drawing: blanks made visible, long ones cut."""
    text = tokenizer.decode([token_id])
    for blank, sign in ((" ", "·"), ("\n", "↵"), ("\t", "→")):
        text = text.replace(blank, sign)
    return text if len(text) <= LABEL_CHARS else text[: LABEL_CHARS - 1] + "…"


def _width(label: str) -> float:
    """Of a label in px: monospaced, East Asian and emoji characters twice as wide, combining ones of no width."""
    cells = sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in label
    )
    return max(cells, 1) * CHAR_WIDTH


def _origins(result: DecodeResult) -> list[str]:
    """In words, who produced each token. A round ends with the target's own token, or with the text."""
    origins, number = ["the target's own, from the prefill"], 1
    for depth in result.token_depth[1:]:
        if depth:
            origins.append(f"round {number}, drafted at depth {depth}, accepted")
            continue
        of_round = result.rounds[number - 1]
        if of_round.drafted == 0:
            kind = "plain step"
        else:
            kind = "correction" if of_round.judged > of_round.accepted else "bonus"
        origins.append(f"round {number}, the target's own, {kind}")
        number += 1
    return origins


def _generation(tokenizer: PreTrainedTokenizerBase, method: Method, trial: Trial, *, is_open: bool) -> str:
    ours = trial.ours
    counts = f"{len(ours.token_ids)} tokens in {len(ours.rounds)} rounds, ended by {_text(ours.finish_reason)}"
    drawings = [
        f"<figure><figcaption>round {number}: {_told(tree)}</figcaption>"
        f'<div class="wide">{tree_svg(tokenizer, tree)}</div></figure>'
        for number, tree in enumerate(ours.trees[:ROUNDS_DRAWN], start=1)
        if tree.tokens
    ]
    details = '<details open="open">' if is_open else "<details>"
    return (
        f'{details}<summary><span class="T">T = {method.temperature:g}</span> <b>{_text(method.name)}</b> '
        f'<span class="figures">{acceptance(method, trial)}; {counts}</span></summary>'
        f'<div class="text">{token_spans(tokenizer, ours)}</div>{"".join(drawings)}</details>'
    )


def _legend(deepest: int) -> str:
    swatches = [f'<span class="t d{depth}">depth {depth}</span>' for depth in range(1, deepest + 1)]
    return f'<span class="t d0">the target’s own</span> drafted and accepted at {" ".join(swatches)}'


def page_style(deepest: int) -> str:
    """The page's style; the colours of the depths are one scale from pale to strong, on a light and on a dark page."""

    def scale(hue: tuple[int, int], saturation: int, lightness: tuple[int, int]) -> str:
        rules = []
        for depth in range(1, deepest + 1):
            part = (depth - 1) / max(1, deepest - 1)
            h, lit = (low + (high - low) * part for low, high in (hue, lightness))
            rules.append(f"--d{depth}:hsl({h:.0f} {saturation}% {lit:.0f}%)")
        return ";".join(rules)

    classes = "".join(
        f".t.d{depth}{{background:var(--d{depth})}}.node.d{depth} rect{{fill:var(--d{depth})}}"
        for depth in range(deepest + 1)
    )
    light, dark = scale((178, 262), 72, (88, 72)), scale((190, 262), 62, (22, 50))
    return (
        ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1d21;--muted:#6b7280;--line:#d5d9e0;"
        f"--d0:#fbe3b4;--own:#b06a00;--on:#2b59c3;{light}}}"
        "@media (prefers-color-scheme:dark){:root{--bg:#15171b;--fg:#eceef1;--muted:#9aa3af;--line:#3a3f48;"
        f"--d0:#5a4008;--own:#f0b040;--on:#8fb4ff;{dark}}}}}{_CSS}{classes}"
    )


_CSS = """
body{margin:0 auto;max-width:1080px;padding:1rem 1.2rem 4rem;background:var(--bg);color:var(--fg);
 font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.35rem;margin:.4rem 0}h2{margin:2.2rem 0 .4rem;border-bottom:2px solid var(--line)}
h3{margin:1.4rem 0 .3rem}
p{margin:.4rem 0;max-width:75ch}
.legend{position:sticky;top:0;z-index:1;background:var(--bg);padding:.45rem 0;border-bottom:1px solid var(--line);
 line-height:1.9;font-size:.9rem}
.prompt{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--muted);border-left:3px solid var(--line);
 padding-left:.8rem;margin-bottom:.6rem;font-size:.92rem}
details{border:1px solid var(--line);border-radius:6px;margin:.35rem 0;padding:.3rem .7rem}
summary{cursor:pointer}summary .T{display:inline-block;min-width:4.2rem}.figures{color:var(--muted);font-size:.9rem}
.text{white-space:pre-wrap;overflow-wrap:anywhere;margin:.6rem 0;
 font:15px/1.75 ui-monospace,"DejaVu Sans Mono",monospace}
.t{padding:.1em 0;border-right:1px solid var(--bg);border-radius:2px}.legend .t{padding:.1em .4em}
.t.nl::before{content:"↵";opacity:.55}.t.part::before{content:"◦";opacity:.55}
figure{margin:.7rem 0}figcaption{font-size:.88rem;color:var(--muted)}.wide{overflow-x:auto}
svg{display:block;font:12px ui-monospace,"DejaVu Sans Mono",monospace}
.edge{fill:none;stroke:var(--line);stroke-width:1}.edge.on{stroke:var(--on);stroke-width:2.2}
.node rect{fill:var(--bg);stroke:var(--line)}.node text{fill:var(--fg)}.node.off text{fill:var(--muted)}
.node.on rect{stroke:var(--on);stroke-width:1.6}.node.root rect{stroke:var(--fg);stroke-width:1.6}
.node.own rect{fill:var(--d0);stroke:var(--own);stroke-width:1.4}.node.own rect+rect{fill:none;stroke-width:1}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8" /><meta name="viewport" content="width=device-width,initial-scale=1" />
<title>{title}: generations</title><style>{style}</style></head><body>
<h1>{title}: generations</h1>
<p>Each token has the colour of who produced it; point at one for its round. The first {rounds} rounds of a text
are drawn below it, root on the left: the accepted path is coloured, the target’s own token behind it has a double
frame, and pale nodes were not accepted. ◦ stands for a token that begins a character (shown at its last token), ↵ for a
new line, · in a drawing for a blank.</p>
<div class="legend">{legend}</div>
{body}
</body></html>
"""
