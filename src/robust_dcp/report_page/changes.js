function showChanges() {
  const changed = DATA.saves.map((save, place) => [save, place]).filter(([save]) =>
    save.plan.changes && save.plan.changes.n_added + save.plan.changes.n_removed + save.plan.changes.n_changed > 0).reverse();
  byId("changes-lead").textContent = changed.length
    ? "Checkpoints whose keys, shapes or dtypes were not those of the save before. A change costs a new plan."
    : "No save found another structure than the save before it.";
  replace(byId("changes"), ...changed.slice(0, 100).map(([save], place) => changeOf(save, place < 2)));
  if (changed.length > 100) byId("changes").append(make("p", { class: "lead" }, `and ${changed.length - 100} older ones`));
}

function changeOf(save, isOpen) {
  const { changes } = save.plan;
  const kinds = [["added", "+"], ["removed", "−"], ["changed", "~"]];
  const counts = kinds.filter(([kind]) => changes[`n_${kind}`]).map(([kind]) => `${changes[`n_${kind}`].toLocaleString("en")} ${kind}`);
  const pairsOf = (keys) => (Array.isArray(keys) ? keys.map((key) => [key, ""]) : Object.entries(keys));
  const list = make("ul", { class: "keys" });
  for (const [kind, sign] of kinds) {
    const pairs = pairsOf(changes[kind]);
    for (const [key, how] of pairs) {
      list.append(make("li", {}, make("b", { "aria-label": kind }, sign), make("span", { class: "mono" }, key),
        ...(how ? [make("span", { class: "how" }, how)] : [])));
    }
    const more = changes[`n_${kind}`] - pairs.length;
    if (more > 0) list.append(make("li", {}, make("b", {}, sign), `${more.toLocaleString("en")} more ${kind}`));
  }
  return make("details", { class: "change", ...(isOpen ? { open: "" } : {}) },
    make("summary", {}, make("span", { class: "mono" }, save.name), make("span", { class: "counts" }, counts.join(", ")),
      " ", badge(save.plan.outcome)),
    list);
}
