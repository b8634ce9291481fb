const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Make an element. Text is always a text node, so nothing in the data can become markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children) element.append(child);
  return element;
}

const replace = (element, ...children) => element.replaceChildren(...children);

function sizeOf(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let place = 0;
  let value = nbytes;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return [place === 0 ? String(value) : value.toPrecision(value >= 1000 ? 4 : 3), units[place]];
}

function secondsOf(seconds) {
  if (seconds === 0) return ["0", "s"];
  if (seconds < 0.001) return [(seconds * 1e6).toFixed(0), "µs"];
  if (seconds < 1) return [(seconds * 1e3).toPrecision(3), "ms"];
  if (seconds < 120) return [seconds.toPrecision(3), "s"];
  if (seconds < 7200) return [(seconds / 60).toPrecision(3), "min"];
  return [(seconds / 3600).toPrecision(3), "h"];
}

const inBytes = (nbytes) => sizeOf(nbytes).join(" ");
const inSeconds = (seconds) => secondsOf(seconds).join(" ");
const inRate = (rate) => `${inBytes(Math.round(rate))}/s`;
const counted = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const moment = (seconds) => {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "?" : `${date.toISOString().replace("T", " ").slice(0, 19)} UTC`;
};

function median(values) {
  if (!values.length) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[(sorted.length - 1) >> 1];
}

/** For how long training stood still in a save. Reports of earlier versions say it by their phases. */
const stillSeconds = (save) => save.blocked_seconds ?? (save.is_async
  ? save.phases.reduce((sum, { name, seconds }) => sum + (name === "plan" || name === "stage" ? seconds : 0), 0)
  : save.seconds);

/** The time between a commit and the one before it; 0 for the first. */
const intervalOf = (save) => {
  const place = DATA.saves.indexOf(save);
  return place > 0 ? Math.max(save.saved_at_seconds - DATA.saves[place - 1].saved_at_seconds, 0) : 0;
};

/** The one rate of this page: the bytes of all ranks by the seconds of the phase in which they were written. */
const writeRate = (save) =>
  save.total_nbytes / Math.max((save.phases.find(({ name }) => name === "write") || save).seconds, 1e-6);

/** The step that a checkpoint's name ends with, for short labels. */
function shortName(name) {
  const digits = /(\d{1,18})\D*$/.exec(name);
  return digits ? String(Number(digits[1])) : name.length > 14 ? `${name.slice(0, 13)}…` : name;
}

const OUTCOMES = {
  reused: "the plan of an earlier save fitted",
  built: "there was no plan to reuse",
  rebuilt: "the structure had changed",
};
const outcomeColour = (outcome) => colour(Object.hasOwn(OUTCOMES, outcome) ? outcome : "other");

/** The tooltip: a title, and pairs of a word and a value. */
const tip = {
  show(x, y, title, pairs) {
    const box = byId("tip");
    const list = make("dl");
    for (const [word, value] of pairs) list.append(make("dt", {}, word), make("dd", {}, value));
    replace(box, make("b", {}, title), list);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const top = y + 16 + height > innerHeight ? y - 12 - height : y + 16;
    box.style.left = `${Math.max(6, Math.min(left, innerWidth - width - 6))}px`;
    box.style.top = `${Math.max(6, top)}px`;
  },
  hide() { byId("tip").hidden = true; },
};

function legend(element, entries) {
  replace(element, ...entries.map(([name, text]) => {
    const swatch = make("i");
    swatch.style.background = colour(name);
    return make("li", {}, swatch, text);
  }));
}

/** The seconds of each phase of a rank, and what it wrote. */
function rankFacts(ranks, row) {
  const speed = ranks.nbytes[row] / Math.max(ranks.write_seconds[row], 1e-6);
  const way = ranks.ways[ranks.how[row]];
  return [
    ["node", ranks.nodes[ranks.node[row]]],
    ["plan", inSeconds(ranks.plan_seconds[row])],
    ...(ranks.stage_seconds[row] ? [["copy", inSeconds(ranks.stage_seconds[row])]] : []),
    ["write", inSeconds(ranks.write_seconds[row])],
    ["wrote", `${inBytes(ranks.nbytes[row])} in ${counted(ranks.files[row], "file")}`],
    ["speed", inRate(speed)],
    ...(way ? [["how", way]] : []),
  ];
}

const rankTitle = (ranks, row) =>
  `Rank ${ranks.rank[row]}`;
