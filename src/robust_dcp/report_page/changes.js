function showChanges() {
  const changed = DATA.saves.map((save, place) => [save, place]).filter(([save]) =>
    save.changes && save.changes.n_added + save.changes.n_removed + save.changes.n_changed > 0).reverse();
  byId("changes-lead").textContent = changed.length
    ? "Checkpoints whose keys, shapes or dtypes were not those of the save before. A change costs a new plan."
    : "No save found another structure than the save before it.";
  replace(byId("changes"), ...changed.slice(0, 100).map(([save], place) => changeOf(save, place < 2)));
  if (changed.length > 100) byId("changes").append(make("p", { class: "lead" }, `and ${changed.length - 100} older ones`));
}

function changeOf(save, isOpen) {
  const { changes } = save;
  const kinds = [["added", "+"], ["removed", "−"], ["changed", "~"]];
  const counts = kinds.filter(([kind]) => changes[`n_${kind}`]).map(([kind]) => `${changes[`n_${kind}`].toLocaleString("en")} ${kind}`);
  const list = make("ul", { class: "keys" });
  for (const [kind, sign] of kinds) {
    for (const [key, how] of changes[kind]) {
      list.append(make("li", {}, make("b", { "aria-label": kind }, sign), make("span", { class: "mono" }, key),
        ...(how ? [make("span", { class: "how" }, how)] : [])));
    }
    const more = changes[`n_${kind}`] - changes[kind].length;
    if (more > 0) list.append(make("li", {}, make("b", {}, sign), `${more.toLocaleString("en")} more ${kind}`));
  }
  return make("details", { class: "change", ...(isOpen ? { open: "" } : {}) },
    make("summary", {}, make("span", { class: "mono" }, save.name), make("span", { class: "counts" }, counts.join(", ")),
      " ", badge(save.outcome)),
    list);
}
