const history = { chosen: 0 };

const MEASURES = [
  ["seconds", "Seconds", (save) => save.seconds, inSeconds],
  ["blocked", "Training stood still", (save) => stillSeconds(save), inSeconds],
  ["interval", "Since the commit before", (save) => intervalOf(save), inSeconds],
  ["bytes", "Bytes", (save) => save.total_nbytes, inBytes],
  ["rate", "Write rate", (save) => writeRate(save), inRate],
];

function drawHistory(context, width, marked) {
  const saves = DATA.saves;
  const left = 82;
  const right = 10;
  const each = width < 500 ? 92 : 104;
  const top = 30;
  const room = width - left - right;
  // If there are more saves than there is room for, one bar stands for several; it shows the slowest.
  const perBar = Math.max(1, Math.ceil(saves.length / (room / 3)));
  const n = Math.ceil(saves.length / perBar);
  const step = Math.min(room / n, 46);
  const bars = Array.from({ length: n }, (_, bar) => {
    const group = saves.slice(bar * perBar, (bar + 1) * perBar).map((save, place) => bar * perBar + place);
    return group.reduce((best, place) => (saves[place].seconds > saves[best].seconds ? place : best), group[0]);
  });
  const height = MEASURES.length * each + 26;
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  let marks = 0;
  MEASURES.forEach(([, title, value, words], place) => {
    const base = place * each + each - 6;
    const tall = each - top - 8;
    const most = Math.max(...bars.map((bar) => value(saves[bar])), 1e-9);
    context.textAlign = "left";
    context.fillStyle = colour("ink");
    context.fillText(title, 0, base - tall - 20);
    context.textAlign = "right";
    context.strokeStyle = colour("grid");
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(base - share * tall) + 0.5;
      context.beginPath(); context.moveTo(left, y); context.lineTo(width - right, y); context.stroke();
      context.fillStyle = colour("soft");
      if (share) context.fillText(words(most * share), left - 8, y);
    }
    bars.forEach((bar, number) => {
      const wide = Math.max(step - (step > 6 ? 3 : step > 3 ? 1 : 0), 1);
      const high = Math.max((value(saves[bar]) / most) * tall, 1);
      context.globalAlpha = bar === history.chosen || marked === number ? 1 : 0.72;
      context.fillStyle = outcomeColour(saves[bar].plan.outcome);
      context.fillRect(left + number * step, base - high, wide, high);
      marks += 1;
      if (place === 0 && saves[bar].stragglers.length && step >= 5) {
        context.globalAlpha = 1;
        context.fillStyle = colour("slow");
        const [x, y] = [left + number * step + wide / 2, base - high - 6];
        context.beginPath(); context.moveTo(x - 4, y - 4); context.lineTo(x + 4, y - 4); context.lineTo(x, y + 3); context.fill();
      }
    });
    context.globalAlpha = 1;
  });
  const bottom = MEASURES.length * each;
  context.strokeStyle = colour("ink");
  context.setLineDash([3, 3]);
  bars.forEach((_, number) => {
    if (!saves.slice(number * perBar, (number + 1) * perBar).some(({ loads }) => loads.length)) return;
    const x = Math.round(left + number * step - 2) + 0.5;
    context.beginPath(); context.moveTo(x, top); context.lineTo(x, bottom); context.stroke();
    marks += 1;
  });
  context.setLineDash([]);
  context.textAlign = "center";
  const every = Math.max(1, Math.ceil(46 / step));
  bars.forEach((bar, number) => {
    const x = left + number * step + step / 2;
    const isChosen = bars[number] === history.chosen;
    if (isChosen) {
      context.strokeStyle = colour("ink");
      context.strokeRect(Math.round(left + number * step - 2) + 0.5, top - 12.5, Math.max(step, 3) + 1, bottom - top + 10);
    }
    if (number % every === 0) {
      context.fillStyle = colour(isChosen ? "ink" : "soft");
      context.fillText(shortName(saves[bar].name), x, bottom + 12);
    }
  });
  return {
    height, marks,
    label: `${MEASURES.map(([, title]) => title.toLowerCase()).join(", ")} of ${counted(saves.length, "checkpoint")}. Use the arrow keys, and Enter to choose one.`,
    at: (x, y) => (x < left || x >= left + n * step || y > bottom ? null : Math.floor((x - left) / step)),
    step: (bar, key) => stepped(bar, key, n),
    place: (bar) => [left + bar * step + step, 40],
    describe: (bar) => {
      const save = saves[bars[bar]];
      return {
        title: save.name,
        pairs: [
          ["saved", moment(save.saved_at_seconds)],
          ...MEASURES.map(([, title, value, words]) => [title.toLowerCase(), words(value(save))]),
          ["ranks", String(save.world_size)],
          ["plan", save.plan.outcome],
          ...(save.stragglers.length ? [["slow", `rank ${save.stragglers[0].rank} on ${save.stragglers[0].node}`]] : []),
          ...save.loads.map(({ checkpoint, seconds }) => ["loaded before", `${checkpoint} in ${inSeconds(seconds)}`]),
          ...(perBar > 1 ? [["bar", `the slowest of ${perBar} checkpoints`]] : []),
        ],
      };
    },
    chosen: (bar) => bars[bar],
  };
}
