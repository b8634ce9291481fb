const THEMES = { system: ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };
let theme = "system";

const charts = {
  timeline: new Chart(byId("timeline"), drawTimeline),
  heatmap: new Chart(byId("heatmap"), drawHeatmap),
  history: new Chart(byId("history"), drawHistory, (bar) => choose(charts.history.drawn.chosen(bar))),
};

function choose(place) {
  history.chosen = place;
  const save = DATA.saves[place];
  timeline.save = heatmap.save = save;
  treemap.tree = save.tree === null ? null : DATA.trees[save.tree];
  treemap.at = 0;
  byId("choice").value = String(place);
  byId("older").disabled = place === 0;
  byId("newer").disabled = place === DATA.saves.length - 1;
  const n = save.ranks ? save.ranks.rank.length : 0;
  byId("timeline-lead").textContent = n
    ? `${save.name}, ${moment(save.saved_at_seconds)}. The phases of ${counted(save.world_size, "rank")}, from the call to the commit.` +
      (n < save.world_size ? ` The first ${n} are shown.` : "")
    : "Only the newest checkpoints are shown rank by rank in this page.";
  byId("heatmap-lead").textContent = n ? "Each cell is a rank, each row of cells a node. The speed of a rank is its bytes by the seconds in which it wrote itself." : "";
  showAll();
}

function showAll() {
  const save = DATA.saves[history.chosen];
  showOverview(save);
  showHeatmapScale(save);
  const shown = new Set(save.phases.map(({ name }) => name));
  legend(byId("timeline-legend"), PHASES.filter(([name]) => name === "wait" || shown.has(name)));
  const outcomes = Object.keys(OUTCOMES).filter((outcome) => DATA.saves.some((each) => each.plan.outcome === outcome));
  legend(byId("history-legend"), outcomes.map((outcome) => [outcome, `${outcome}: ${OUTCOMES[outcome]}`]));
  if (DATA.saves.some((each) => each.stragglers.length)) {
    byId("history-legend").append(make("li", {}, "▼ ranks were named as slow"));
  }
  if (DATA.saves.some((each) => each.loads.length)) {
    byId("history-legend").append(make("li", {}, "┆ a checkpoint was loaded before this save"));
  }
  showChanges();
  showTreemap();
  for (const chart of Object.values(charts)) chart.update();
}

function setTheme(name) {
  theme = name;
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = THEMES[name][0];
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[name][1]}`);
  byId("theme").title = `Colours: ${THEMES[name][1]}`;
}

const title = DATA.saves.length === 1 ? DATA.saves[0].name : DATA.path.split("/").filter(Boolean).pop() || "/";
document.title = `${title} · checkpoint report`;
byId("title").textContent = DATA.saves.length === 1 ? title : `${title}: ${counted(DATA.saves.length, "checkpoint")}`;
byId("path").append(make("bdi", {}, DATA.path));
byId("path").title = DATA.path;
byId("picker").hidden = DATA.saves.length < 2;
byId("history-card").hidden = DATA.saves.length < 2;
byId("history-lead").textContent = "One bar is one checkpoint, and its colour says how the save came by its plan. Choose a bar to see that save above.";
byId("choice").append(...DATA.saves.map((save, place) => make("option", { value: String(place) }, save.name)).reverse());
byId("choice").addEventListener("change", (event) => choose(Number(event.target.value)));
byId("older").addEventListener("click", () => choose(history.chosen - 1));
byId("newer").addEventListener("click", () => choose(history.chosen + 1));
byId("by-time").addEventListener("change", (event) => { timeline.slowestFirst = event.target.checked; charts.timeline.update(); });
const order = Object.keys(THEMES);
byId("theme").addEventListener("click", () => { setTheme(order[(order.indexOf(theme) + 1) % order.length]); showAll(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAll);
let widthBefore = innerWidth;
addEventListener("resize", () => { if (innerWidth !== widthBefore) { widthBefore = innerWidth; showTreemap(); } });
setTheme("system");
showSkipped();
choose(DATA.saves.length - 1);
document.documentElement.dataset.ready = "yes";
