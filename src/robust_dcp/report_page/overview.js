function tile(label, [value, unit], note, kind = "") {
  return make("div", { class: `tile ${kind}` },
    make("div", { class: "label" }, label),
    make("div", { class: "value" }, value, ...(unit ? [make("small", {}, unit)] : [])),
    make("div", { class: "note", title: note }, note));
}

function badge(outcome) {
  const element = make("span", { class: "badge" }, outcome);
  element.style.color = outcomeColour(outcome);
  return element;
}

function showOverview(save) {
  const ranks = save.ranks;
  const slowest = ranks ? ranks.write_seconds.reduce((best, value, row) => (value > ranks.write_seconds[best] ? row : best), 0) : null;
  const rate = writeRate(save);
  const isSlow = save.stragglers.length > 0;
  replace(byId("tiles"),
    ...(save.is_async ? [tile("Training stood still", secondsOf(stillSeconds(save)), "until the call returned")] : []),
    tile(save.is_async ? "Save, beside training" : "Save; training stood still", secondsOf(save.seconds),
      save.phases.map(({ name, seconds }) => `${name} ${inSeconds(seconds)}`).join(" · ")),
    ...(intervalOf(save) ? [tile("Since the commit before", secondsOf(intervalOf(save)), medianInterval())] : []),
    tile("Written", sizeOf(save.total_nbytes), `by ${counted(save.world_size, "rank")} on ${counted(save.n_nodes, "node")}`),
    tile("Write rate, all ranks", [sizeOf(Math.round(rate))[0], `${sizeOf(Math.round(rate))[1]}/s`],
      "bytes by the seconds of the write phase"),
    tile("Plan", [save.plan.outcome, ""], save.plan.reason),
    ...save.loads.slice(-1).map((load) => tile("Loaded before it", secondsOf(load.seconds), loadFacts(load))),
    ...(slowest === null ? [] : [tile("Slowest writer", [`rank ${ranks.rank[slowest]}`, ""],
      `${inSeconds(ranks.write_seconds[slowest])}; the median rank took ${inSeconds(median(ranks.write_seconds))}`,
      isSlow ? "slow" : "")]));
  const notices = [];
  if (isSlow) notices.push(stragglerNotice(save));
  const again = slowAgain();
  if (again.length) notices.push(notice("Slow again and again", again));
  if (save.identical_to) notices.push(notice("No parameter has changed", [`all are bit for bit those in ${save.identical_to}`]));
  for (const load of save.loads) {
    if (load.waits.length) notices.push(notice(`The log said while ranks loaded ${load.checkpoint}`, load.waits));
  }
  if (save.waits.length) notices.push(notice("The log said while ranks waited", save.waits));
  if (save.fallbacks.length) notices.push(notice("The save went without", save.fallbacks));
  replace(byId("notices"), ...notices);
  showAbout(save);
}

/** What was loaded, when, and how long each phase took. */
function loadFacts({ checkpoint, loaded_at_seconds: at, nbytes, phases }) {
  return `${checkpoint}, ${moment(at)}: ${phases.map(({ name, seconds }) => `${name} ${inSeconds(seconds)}`).join(" · ")}; ` +
    `rank 0 read ${inBytes(nbytes)}`;
}

function medianInterval() {
  const intervals = DATA.saves.map(intervalOf).filter((seconds) => seconds > 0);
  return `the median of this run is ${inSeconds(median(intervals))}`;
}

/** The ranks that were named as slow in more than one of the saves, the most often named first. */
function slowAgain() {
  const counts = new Map();
  for (const save of DATA.saves) {
    for (const rank of new Set(save.stragglers.map((each) => each.rank))) counts.set(rank, (counts.get(rank) || 0) + 1);
  }
  const often = [...counts].filter(([, n]) => n > 1).sort(([a, m], [b, n]) => n - m || a - b);
  const lines = often.slice(0, 6).map(([rank, n]) => `rank ${rank}: in ${n} of ${DATA.saves.length} saves`);
  return often.length > 6 ? [...lines, `and ${counted(often.length - 6, "other rank")}`] : lines;
}

function notice(title, lines) {
  const box = make("div", { class: "notice" }, make("b", {}, title));
  if (lines.length) box.append(make("ul", {}, ...lines.map((line) => make("li", {}, line))));
  return box;
}

function stragglerNotice(save) {
  const words = { plan: "came late by", stage: "copied for", write: "wrote for" };
  const lines = save.stragglers.slice(0, 6).map(({ rank, node, phase, seconds, median_seconds: middle }) =>
    `rank ${rank} on ${node} ${words[phase] || `${phase}:`} ${inSeconds(seconds)}` +
    (middle ? `; the median rank ${words[phase] || ""} ${inSeconds(middle)}` : ""));
  const more = save.stragglers.length - lines.length;
  if (more > 0) lines.push(`and ${more} more`);
  const ranks = new Set(save.stragglers.map(({ rank }) => rank));
  return notice(`All ranks waited for ${ranks.size === 1 ? "one of them" : `${ranks.size} of them`}`, lines);
}

function showAbout(save) {
  const facts = [
    ["Checkpoint", save.checkpoint],
    ["Committed", moment(save.saved_at_seconds)],
    ["Plan", `${save.plan.outcome}: ${save.plan.reason}`],
    ["Save id", save.save_id],
    ...save.loads.map((load) => ["Loaded before it", `${loadFacts(load)}, together ${inSeconds(load.seconds)}`]),
    ["Versions", Object.entries(save.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
  if (save.ranks) {
    const counts = save.ranks.ways.map((way, place) => [way, save.ranks.how.filter((how) => how === place).length]).filter(([, n]) => n);
    facts.splice(3, 0, ["How ranks wrote", counts.map(([way, n]) => `${way || "?"} (${counted(n, "rank")})`).join("; ")]);
  }
  const list = make("dl", { class: "facts" });
  for (const [word, value] of facts) list.append(make("dt", {}, word), make("dd", {}, value));
  replace(byId("about"), list);
}

function showSkipped() {
  if (!DATA.n_skipped) return;
  const rows = DATA.skipped.map(({ name, reason }) => make("li", {}, make("span", { class: "mono" }, name), ` ${reason}`));
  byId("skipped").append(make("details", { class: "more" },
    make("summary", {}, `${counted(DATA.n_skipped, "checkpoint")} without a report that could be shown`),
    make("ul", { class: "keys" }, ...rows)));
}
