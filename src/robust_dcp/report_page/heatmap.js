const heatmap = { save: null };

/** Orange is slower than the median rank, blue is faster: people who confuse red and green can tell them apart. */
function rateColour(share) {
  const amount = Math.max(-1, Math.min(1, Math.log2(Math.max(share, 1e-9))));
  return mixed(colour("even"), colour(amount < 0 ? "slow" : "fast"), Math.abs(amount) ** 0.8);
}

const parsed = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function mixed(from, to, amount) {
  const [a, b] = [parsed(from), parsed(to)];
  return `rgb(${a.map((value, place) => Math.round(value + (b[place] - value) * amount)).join(" ")})`;
}

function heatmapLayout(ranks, width) {
  const nodes = ranks.nodes.map(() => []);
  ranks.rank.forEach((_, row) => nodes[ranks.node[row]].push(row));
  const used = nodes.map((rows, node) => [node, rows]).filter(([, rows]) => rows.length);
  const most = used.reduce((n, [, rows]) => Math.max(n, rows.length), 1);
  const few = used.length <= 24;
  const label = few ? Math.min(150, Math.max(70, width * 0.2)) : 34;
  const perRow = Math.min(most, 16);
  // Nodes stand in as many columns as there is room for.
  const columns = few && used.length <= 12 ? 1 : Math.max(1, Math.min(Math.floor(width / (label + perRow * 9 + 14)), Math.ceil(used.length / 4)));
  const block = width / columns;
  const cell = Math.max(3, Math.min(few ? 26 : 15, Math.floor((block - label - 12) / perRow)));
  const inRow = Math.max(1, Math.min(most, Math.floor((block - label - 12) / cell)));
  const high = Math.ceil(most / inRow) * cell + (few ? 4 : 3);
  const down = Math.ceil(used.length / columns);
  const cells = [];
  used.forEach(([node, rows], place) => {
    const x = Math.floor(place / down) * block + label;
    const y = (place % down) * high;
    rows.forEach((row, number) => {
      cells.push({ row, node, x: x + (number % inRow) * cell, y: y + Math.floor(number / inRow) * cell });
    });
  });
  return { used, label, few, cell, inRow, high, down, block, cells, height: down * high + 2 };
}

function drawHeatmap(context, width, marked) {
  const { save } = heatmap;
  const ranks = save.ranks;
  if (!ranks) return nothing(context, width, "This report holds no rows of ranks.");
  const layout = heatmapLayout(ranks, width);
  const rates = ranks.nbytes.map((nbytes, row) => nbytes / Math.max(ranks.write[row], 1e-6));
  const middle = median(rates.filter((rate, row) => ranks.nbytes[row] > 0)) || 1;
  const late = new Set(save.stragglers.filter(([, , phase]) => phase === "write").map(([rank]) => rank));
  context.clearRect(0, 0, width, layout.height);
  context.font = layout.few ? FONT : FONT.replace("12px", "10px");
  context.textBaseline = "middle";
  context.fillStyle = colour("soft");
  context.textAlign = "right";
  layout.used.forEach(([node], place) => {
    const name = layout.few ? ranks.nodes[node] : String(place);
    const [x, y] = [Math.floor(place / layout.down) * layout.block, (place % layout.down) * layout.high];
    if (layout.few || layout.high >= 11 || place % layout.down % 2 === 0) {
      context.fillText(fitted(context, name, layout.label - 10), x + layout.label - 6, y + layout.cell / 2);
    }
  });
  const gap = layout.cell >= 8 ? 1.5 : layout.cell >= 5 ? 1 : 0.5;
  for (const { row, x, y } of layout.cells) {
    context.fillStyle = ranks.nbytes[row] ? rateColour(rates[row] / middle) : colour("page");
    context.fillRect(x, y, layout.cell - gap, layout.cell - gap);
  }
  context.strokeStyle = colour("ink");
  context.lineWidth = layout.cell >= 8 ? 2 : 1;
  for (const { row, x, y } of layout.cells) {
    if (late.has(ranks.rank[row])) context.strokeRect(x + 0.5, y + 0.5, layout.cell - gap - 1, layout.cell - gap - 1);
  }
  if (marked !== null) {
    const { x, y } = layout.cells[marked];
    context.strokeStyle = colour("focus");
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, layout.cell - gap + 2, layout.cell - gap + 2);
  }
  context.lineWidth = 1;
  return {
    height: layout.height,
    marks: layout.cells.length,
    label: `Write rates of ${counted(layout.cells.length, "rank")} on ${counted(layout.used.length, "node")}; the median is ` +
      `${inRate(middle)}. Use the arrow keys to go from rank to rank.`,
    at: (x, y) => {
      const place = layout.cells.findIndex((each) =>
        x >= each.x && x < each.x + layout.cell && y >= each.y && y < each.y + layout.cell);
      return place < 0 ? null : place;
    },
    step: (mark, key) => {
      const isDown = key === "ArrowDown" || key === "ArrowUp";
      if (!isDown || mark === null) return stepped(mark, key, layout.cells.length);
      const { x, y } = layout.cells[mark];
      const isBelow = (each) => (key === "ArrowDown" ? each.y > y : each.y < y) && Math.abs(each.x - x) < layout.cell;
      const below = layout.cells.map((each, place) => [each, place]).filter(([each]) => isBelow(each));
      below.sort(([a], [b]) => Math.abs(a.y - y) - Math.abs(b.y - y));
      return below.length ? below[0][1] : mark;
    },
    place: (mark) => [layout.cells[mark].x + layout.cell, layout.cells[mark].y],
    describe: (mark) => {
      const { row } = layout.cells[mark];
      const share = ["of the median", `${Math.round((rates[row] / middle) * 100)} %`];
      return { title: rankTitle(ranks, row), pairs: [...rankFacts(ranks, row), share] };
    },
  };
}

function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

function showHeatmapScale(save) {
  const scale = byId("heatmap-scale");
  if (!save.ranks) { replace(scale); replace(byId("rank-table")); return; }
  const ranks = save.ranks;
  const rates = ranks.nbytes.map((nbytes, row) => nbytes / Math.max(ranks.write[row], 1e-6));
  const middle = median(rates.filter((rate, row) => ranks.nbytes[row] > 0)) || 1;
  const band = make("canvas", { width: 180, height: 10, role: "img", "aria-label": "from orange, slow, to blue, fast" });
  const context = band.getContext("2d");
  for (let x = 0; x < 180; x += 1) {
    context.fillStyle = rateColour(2 ** ((x / 179) * 2 - 1));
    context.fillRect(x, 0, 1, 10);
  }
  replace(scale, `≤ ${inRate(middle / 2)}`, band, `≥ ${inRate(middle * 2)}`, ` median ${inRate(middle)}`,
    make("span", { class: "mark", "aria-hidden": "true" }), "named as slow");
  const order = ranks.rank.map((_, row) => row).sort((a, b) => ranks.write[b] - ranks.write[a]).slice(0, 40);
  const head = ["rank", "node", "plan", "copy", "write", "bytes", "files", "rate", "how"];
  const cells = (row) => [ranks.rank[row], ranks.nodes[ranks.node[row]], inSeconds(ranks.plan[row]), inSeconds(ranks.stage[row]),
    inSeconds(ranks.write[row]), inBytes(ranks.nbytes[row]), ranks.files[row], inRate(rates[row]), ranks.ways[ranks.how[row]] || ""];
  replace(byId("rank-table"), make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((word) => make("th", { scope: "col" }, word)))),
    make("tbody", {}, ...order.map((row) => make("tr", {},
      ...cells(row).map((value, place) => make("td", place === 8 ? { class: "wide" } : {}, String(value))))))));
}
