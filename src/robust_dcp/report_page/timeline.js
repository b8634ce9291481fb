const timeline = { save: null, slowestFirst: false };

const PHASES = [
  ["plan", "plan: describe and agree"], ["stage", "copy to host (async)"], ["write", "write"],
  ["wait", "wait for other ranks"], ["commit", "commit"],
];

/** Begin and end of each phase of a row, in seconds. All ranks leave the plan at the same moment. */
function spansOf(save, ranks) {
  const agreed = ranks.plan_seconds.reduce((most, seconds) => Math.max(most, seconds), 0);
  const phases = Object.fromEntries(save.phases.map(({ name, seconds }) => [name, seconds]));
  const ends = ranks.write_seconds.map((seconds, row) => agreed + ranks.stage_seconds[row] + seconds);
  const written = ends.reduce((most, end) => Math.max(most, end), agreed + (phases.stage || 0) + (phases.write || 0));
  const committed = written + (phases.commit || 0);
  return { agreed, ends, written, committed };
}

function drawTimeline(context, width, marked) {
  const { save } = timeline;
  const ranks = save.ranks;
  const n = ranks ? ranks.rank.length : 0;
  if (!n) return nothing(context, width, "This report holds no rows of ranks.");
  const order = Array.from({ length: n }, (_, row) => row);
  if (timeline.slowestFirst) order.sort((a, b) => ranks.write_seconds[b] + ranks.stage_seconds[b] - ranks.write_seconds[a] - ranks.stage_seconds[a]);
  const left = width < 500 ? 42 : 56;
  const right = 12;
  const foot = 26;
  const row = n <= 16 ? 20 : n <= 40 ? 12 : n <= 120 ? 5 : Math.max(1, Math.min(3, Math.floor(560 / n)));
  const perLine = Math.max(1, Math.ceil((n * row) / 560));
  const lines = Math.ceil(n / perLine);
  const tall = Math.ceil(lines * row);
  const height = tall + foot;
  const spans = spansOf(save, ranks);
  const scale = (seconds) => left + (seconds / spans.committed) * (width - left - right);
  const lineOf = (line) => {
    // Of several ranks on one line the one that took longest is shown.
    let best = order[line * perLine];
    for (let each = line * perLine; each < Math.min(n, (line + 1) * perLine); each += 1) {
      if (spans.ends[order[each]] > spans.ends[best]) best = order[each];
    }
    return best;
  };
  const gap = row >= 12 ? 4 : row >= 5 ? 1 : 0;
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  const grid = ticks(spans.committed, width < 500 ? 3 : 6);
  context.strokeStyle = colour("grid");
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  for (const tick of grid) {
    const x = Math.round(scale(tick)) + 0.5;
    context.beginPath(); context.moveTo(x, 0); context.lineTo(x, tall); context.stroke();
    context.fillText(inSeconds(tick), Math.min(x, width - 22), tall + 15);
  }
  const colours = Object.fromEntries(PHASES.map(([name]) => [name, colour(name)]));
  let marks = 0;
  const bar = (name, from, to, y) => {
    if (to - from < 1e-9) return;
    context.fillStyle = colours[name];
    context.fillRect(scale(from), y + gap / 2, Math.max(scale(to) - scale(from), 0.6), row - gap);
    marks += 1;
  };
  context.textAlign = "right";
  const every = row >= 12 ? 1 : Math.max(1, Math.ceil(lines / 8));
  for (let line = 0; line < lines; line += 1) {
    const rank = lineOf(line);
    const y = line * row;
    bar("plan", spans.agreed - ranks.plan_seconds[rank], spans.agreed, y);
    bar("stage", spans.agreed, spans.agreed + ranks.stage_seconds[rank], y);
    bar("write", spans.agreed + ranks.stage_seconds[rank], spans.ends[rank], y);
    bar("wait", spans.ends[rank], spans.written, y);
    bar("commit", spans.written, spans.committed, y);
    if (line % every === 0 && (row >= 12 || y + 12 < tall || line === 0)) {
      context.fillStyle = colour("soft");
      context.fillText(String(ranks.rank[order[line * perLine]]), left - 8, y + Math.max(row / 2, 6));
    }
  }
  if (marked !== null) {
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(left - 3, marked * row + gap / 2 - 1, width - left - right + 6, Math.max(row - gap, 1) + 2);
    context.lineWidth = 1;
  }
  return {
    height, marks,
    label: `Phases of ${counted(n, "rank")} over ${inSeconds(spans.committed)}. Use the arrow keys to go from rank to rank.`,
    at: (x, y) => (x >= left - 40 && y >= 0 && y < lines * row ? Math.min(lines - 1, Math.floor(y / row)) : null),
    step: (line, key) => stepped(line, key, lines),
    place: (line) => [left + 60, line * row],
    describe: (line) => {
      const rank = lineOf(line);
      const waited = spans.written - spans.ends[rank];
      const folded = perLine > 1 ? [["line", `the slowest of ${counted(perLine, "rank")}`]] : [];
      return { title: rankTitle(ranks, rank), pairs: [...rankFacts(ranks, rank), ["waited", inSeconds(Math.max(waited, 0))], ...folded] };
    },
  };
}

function nothing(context, width, text) {
  context.clearRect(0, 0, width, 40);
  context.font = FONT;
  context.textAlign = "left";
  context.fillStyle = colour("soft");
  context.fillText(text, 0, 22);
  return { height: 40, marks: 0, label: text, at: () => null, step: () => null, place: () => [0, 0], describe: () => null };
}
