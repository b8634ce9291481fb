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

/** Host names without what all of them begin and end with, such as `0005` for `gpu-0005.cluster.example`. */
function shortNodes(names) {
  if (names.length < 2) return names;
  const alike = (at) => names.every((name) => name[at < 0 ? name.length + at : at] === names[0][at < 0 ? names[0].length + at : at]);
  const shortest = Math.min(...names.map((name) => name.length));
  let start = 0;
  while (start < shortest && alike(start)) start += 1;
  while (start > 0 && /\d/.test(names[0][start - 1])) start -= 1;
  let end = 0;
  while (end < shortest - start && alike(-end - 1)) end += 1;
  while (end > 0 && /[A-Za-z0-9]/.test(names[0][names[0].length - end])) end -= 1;
  return names.map((name) => name.slice(start, name.length - end) || name);
}

const MOST_HIGH = 460;

/** Where each cell stands: nodes one below the other, in as many columns as give the largest cells. */
function heatmapLayout(ranks, width) {
  const nodes = ranks.nodes.map(() => []);
  ranks.rank.forEach((_, row) => nodes[ranks.node[row]].push(row));
  const used = nodes.map((rows, node) => [node, rows]).filter(([, rows]) => rows.length);
  const names = shortNodes(used.map(([node]) => ranks.nodes[node]));
  const most = used.reduce((n, [, rows]) => Math.max(n, rows.length), 1);
  const letters = names.reduce((n, name) => Math.max(n, name.length), 1);
  let label = Math.min(letters * 7 + 12, used.length > 12 ? 76 : 170, width * 0.3);
  let best = null;
  for (let columns = 1; columns <= Math.min(used.length, 40); columns += 1) {
    const block = width / columns;
    const room = block - label - 10;
    const down = Math.ceil(used.length / columns);
    for (let inRow = most; inRow >= 1; inRow = inRow > 1 ? Math.ceil(inRow / 2) : 0) {
      const cell = Math.min(28, Math.floor(room / inRow));
      const high = Math.ceil(most / inRow) * cell + (cell > 10 ? 4 : 2);
      const layout = { block, down, inRow, cell, high, height: down * high + 2 };
      const fits = cell >= 3 && layout.height <= MOST_HIGH;
      if (fits && (!best || cell > best.cell)) best = layout;
    }
  }
  if (!best) best = { block: width, down: used.length, inRow: Math.max(1, Math.floor((width - label - 10) / 3)), cell: 3, high: 0, height: 0 };
  if (!best.high) {
    best.high = Math.ceil(most / best.inRow) * 3 + 2;
    best.height = best.down * best.high + 2;
  }
  // Names are not cut beside room that no cell needs.
  label = Math.min(letters * 7.5 + 14, Math.max(label, best.block - 10 - Math.min(best.inRow, most) * best.cell));
  const cells = used.flatMap(([node, rows], place) => {
    const x = Math.floor(place / best.down) * best.block + label;
    const y = (place % best.down) * best.high;
    return rows.map((row, number) => ({
      row, node, x: x + (number % best.inRow) * best.cell, y: y + Math.floor(number / best.inRow) * best.cell,
    }));
  });
  return { ...best, used, names, label, cells };
}

function drawHeatmap(context, width, marked) {
  const { save } = heatmap;
  const ranks = save.ranks;
  if (!ranks) return nothing(context, width, "This report holds no rows of ranks.");
  const layout = heatmapLayout(ranks, width);
  const rates = ranks.nbytes.map((nbytes, row) => nbytes / Math.max(ranks.write_seconds[row], 1e-6));
  const middle = median(rates.filter((rate, row) => ranks.nbytes[row] > 0)) || 1;
  const late = new Set(save.stragglers.filter(({ phase }) => phase === "write").map(({ rank }) => rank));
  context.clearRect(0, 0, width, layout.height);
  context.font = layout.high >= 14 ? FONT : FONT.replace("12px", "9px");
  context.textBaseline = "middle";
  context.fillStyle = colour("soft");
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(11 / layout.high));
  layout.names.forEach((name, place) => {
    const [x, y] = [Math.floor(place / layout.down) * layout.block, (place % layout.down) * layout.high];
    if ((place % layout.down) % every === 0) {
      context.fillText(fitted(context, name, layout.label - 8), x + layout.label - 6, y + Math.max(layout.cell / 2, 5));
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
    label: `Speeds of ${counted(layout.cells.length, "rank")} on ${counted(layout.used.length, "node")}; the median is ` +
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
  const rates = ranks.nbytes.map((nbytes, row) => nbytes / Math.max(ranks.write_seconds[row], 1e-6));
  const middle = median(rates.filter((rate, row) => ranks.nbytes[row] > 0)) || 1;
  const band = make("canvas", { width: 180, height: 10, role: "img", "aria-label": "from orange, slow, to blue, fast" });
  const context = band.getContext("2d");
  for (let x = 0; x < 180; x += 1) {
    context.fillStyle = rateColour(2 ** ((x / 179) * 2 - 1));
    context.fillRect(x, 0, 1, 10);
  }
  replace(scale, `≤ ${inRate(middle / 2)}`, band, `≥ ${inRate(middle * 2)}`, `· median ${inRate(middle)}`,
    make("span", { class: "mark", "aria-hidden": "true" }), "named as slow");
  const order = ranks.rank.map((_, row) => row).sort((a, b) => ranks.write_seconds[b] - ranks.write_seconds[a]).slice(0, 40);
  const head = ["rank", "node", "plan", "copy", "write", "bytes", "files", "speed", "how"];
  const cells = (row) => [ranks.rank[row], ranks.nodes[ranks.node[row]], inSeconds(ranks.plan_seconds[row]), inSeconds(ranks.stage_seconds[row]),
    inSeconds(ranks.write_seconds[row]), inBytes(ranks.nbytes[row]), ranks.files[row], inRate(rates[row]), ranks.ways[ranks.how[row]] || ""];
  replace(byId("rank-table"), make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((word) => make("th", { scope: "col" }, word)))),
    make("tbody", {}, ...order.map((row) => make("tr", {},
      ...cells(row).map((value, place) => make("td", place === 8 ? { class: "wide" } : {}, String(value))))))));
}
