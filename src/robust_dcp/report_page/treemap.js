const treemap = { tree: null, at: 0 };

// White text can be read on each of them, in both themes.
const HUES = ["#3b6ba5", "#7a5195", "#2f7f79", "#a04f6b", "#6c7a2c", "#8a5a2b", "#4f5d95", "#5c6670"];

function childrenOf(tree) {
  const children = tree.name.map(() => []);
  tree.parent.forEach((parent, row) => { if (parent >= 0 && parent < row) children[parent].push(row); });
  return children;
}

/** Rectangles as square as possible: [{row, x, y, width, height}] for [row, weight] pairs, the largest first. */
function squarified(items, x, y, width, height) {
  const total = items.reduce((sum, [, weight]) => sum + weight, 0);
  const out = [];
  let rest = items.map(([row, weight]) => [row, (weight / total) * width * height]).filter(([, area]) => area > 0);
  const worst = (row, side, sum) =>
    row.reduce((most, [, area]) => Math.max(most, (side * side * area) / (sum * sum), (sum * sum) / (side * side * area)), 0);
  while (rest.length) {
    const side = Math.min(width, height);
    if (!(side > 0)) break;
    let count = 1;
    let sum = rest[0][1];
    let quality = worst(rest.slice(0, 1), side, sum);
    while (count < rest.length) {
      const next = worst(rest.slice(0, count + 1), side, sum + rest[count][1]);
      if (next > quality) break;
      sum += rest[count][1];
      count += 1;
      quality = next;
    }
    const thick = sum / side;
    let along = 0;
    for (const [row, area] of rest.slice(0, count)) {
      const long = area / thick;
      out.push(width < height ? { row, x: x + along, y, width: long, height: thick } : { row, x, y: y + along, width: thick, height: long });
      along += long;
    }
    if (width < height) { y += thick; height -= thick; } else { x += thick; width -= thick; }
    rest = rest.slice(count);
  }
  return out;
}

function showTreemap() {
  const { tree, at } = treemap;
  const box = byId("treemap");
  if (!tree) { replace(byId("treemap-crumbs")); replace(box, make("p", { class: "lead" }, "This report holds no sizes of modules.")); return; }
  const children = childrenOf(tree);
  const width = box.clientWidth;
  const height = innerWidth <= 640 ? 360 : 420;
  const area = make("div", { class: "tree", role: "group", "aria-label": "Modules by size" });
  const path = (row) => { const names = []; for (let each = row; each > 0; each = tree.parent[each]) names.unshift(tree.name[each]); return names.join("."); };
  const weighed = (row) => {
    const rows = children[row].map((child) => [child, tree.nbytes[child]]).sort((a, b) => b[1] - a[1]);
    const rest = tree.nbytes[row] - rows.reduce((sum, [, nbytes]) => sum + nbytes, 0);
    return rest > tree.nbytes[row] * 0.001 ? [...rows, [-1, rest]] : rows;
  };
  let marks = 0;
  const put = (rectangle, hue, depth, inside, share, holds) => {
    const { row, x, y, width: wide, height: high } = rectangle;
    if (wide < 2 || high < 2) return;
    const opens = row >= 0 && children[row].length > 0;
    const nbytes = row >= 0 ? tree.nbytes[row] : share;
    const name = row >= 0 ? tree.name[row] : "the rest";
    const full = row >= 0 ? path(row) : `the rest of ${path(inside) || "the checkpoint"}`;
    const button = make("button", { type: "button", class: `${opens ? "opens" : ""} ${holds ? "group" : ""}`,
      "aria-label": `${full}, ${inBytes(nbytes)}`, tabindex: depth === 0 || wide * high > 3000 ? "0" : "-1" });
    Object.assign(button.style, { left: `${x}px`, top: `${y}px`, width: `${Math.max(wide - 1.5, 1)}px`, height: `${Math.max(high - 1.5, 1)}px`,
      background: row < 0 ? "#6b7482" : mixed(HUES[hue % HUES.length], "#ffffff", depth * 0.075) });
    if (wide > 34 && high > 17) {
      button.append(make("span", {}, holds && wide > 150 ? `${name} · ${inBytes(nbytes)}` : name));
      if (high > 36 && !holds) button.append(make("span", {}, inBytes(nbytes)));
    }
    const pairs = [["size", inBytes(nbytes)], ["share", `${((nbytes / (tree.nbytes[0] || 1)) * 100).toPrecision(3)} % of the checkpoint`],
      ...(opens ? [["", "click to look inside"]] : [])];
    button.addEventListener("pointermove", (event) => tip.show(event.clientX, event.clientY, full, pairs));
    button.addEventListener("pointerleave", () => tip.hide());
    button.addEventListener("focus", () => { const at = button.getBoundingClientRect(); tip.show(at.left + 20, at.top + 10, full, pairs); });
    button.addEventListener("blur", () => tip.hide());
    if (opens) button.addEventListener("click", () => openModule(row));
    area.append(button);
    marks += 1;
  };
  const rest = (row) => tree.nbytes[row] - children[row].reduce((sum, child) => sum + tree.nbytes[child], 0);
  const fill = (inside, x, y, wide, high, depth, hue) => {
    squarified(weighed(inside), x, y, wide, high).forEach((each, number) => {
      const own = each.row < 0 ? 7 : depth === 0 ? number % 7 : hue;
      const holds = each.row >= 0 && children[each.row].length > 0 && depth < 3 && each.width >= 56 && each.height >= 48;
      put(each, own, depth, inside, rest(inside), holds);
      if (holds) fill(each.row, each.x + 3, each.y + 20, each.width - 7.5, each.height - 24.5, depth + 1, own);
    });
  };
  fill(at, 0, 0, width, height, 0, 0);
  area.dataset.marks = String(marks);
  replace(box, area);
  showCrumbs(tree, at);
}

function openModule(row) {
  tip.hide();
  treemap.at = row;
  showTreemap();
  const crumbs = byId("treemap-crumbs").querySelectorAll("button");
  if (crumbs.length) crumbs[crumbs.length - 1].focus();
}

function showCrumbs(tree, at) {
  const rows = [];
  for (let each = at; each >= 0; each = tree.parent[each]) rows.unshift(each);
  const crumbs = rows.flatMap((row, place) => {
    const button = make("button", { type: "button", "aria-current": row === at ? "location" : null }, row === 0 ? "checkpoint" : tree.name[row]);
    button.addEventListener("click", () => openModule(row));
    return place ? ["›", button] : [button];
  });
  replace(byId("treemap-crumbs"), ...crumbs, make("span", { class: "total" }, inBytes(tree.nbytes[at])));
}
