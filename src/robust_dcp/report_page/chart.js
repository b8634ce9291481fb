/**
 * A canvas that is drawn again when its width or the colours change. Marks under the pointer have a tooltip; with the
 * keyboard one goes from mark to mark.
 */
class Chart {
  /** `draw(context, width)` returns {height, marks, at(x, y) -> mark, step(mark, key) -> mark, describe(mark)}. */
  constructor(canvas, draw, choose = null) {
    this.canvas = canvas;
    this.draw = draw;
    this.choose = choose;
    this.drawn = null;
    this.mark = null;
    new ResizeObserver(() => this.update()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("click", () => { if (this.mark !== null && this.choose) this.choose(this.mark); });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  update() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const pixels = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    const measured = this.draw(context, width, null);
    this.canvas.width = Math.round(width * pixels);
    this.canvas.height = Math.round(measured.height * pixels);
    this.canvas.style.height = `${measured.height}px`;
    context.setTransform(pixels, 0, 0, pixels, 0, 0);
    this.drawn = this.draw(context, width, this.mark);
    this.canvas.dataset.marks = String(this.drawn.marks);
    this.canvas.setAttribute("aria-label", this.drawn.label);
  }

  point(event) {
    if (!this.drawn) return;
    const box = this.canvas.getBoundingClientRect();
    const mark = this.drawn.at(event.clientX - box.left, event.clientY - box.top);
    this.canvas.style.cursor = mark !== null && this.choose ? "pointer" : "default";
    if (mark === null) { this.leave(); return; }
    this.show(mark, event.clientX, event.clientY);
  }

  show(mark, x, y) {
    const { title, pairs } = this.drawn.describe(mark);
    if (mark !== this.mark) { this.mark = mark; this.update(); }
    tip.show(x, y, title, pairs);
    return `${title}: ${pairs.map((pair) => pair.join(" ")).join(", ")}`;
  }

  leave() {
    tip.hide();
    if (this.mark !== null) { this.mark = null; this.update(); }
  }

  key(event) {
    if (event.key === "Escape") { this.leave(); return; }
    if (event.key === "Enter" && this.mark !== null && this.choose) { this.choose(this.mark); return; }
    if (!["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !this.drawn) return;
    const mark = this.drawn.step(this.mark, event.key);
    if (mark === null) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.drawn.place(mark);
    byId("said").textContent = this.show(mark, box.left + x, box.top + y);
  }
}

/** The next mark of `n` in a row, for a key. */
function stepped(mark, key, n, sideways = 1) {
  if (!n) return null;
  if (key === "Home") return 0;
  if (key === "End") return n - 1;
  if (mark === null) return 0;
  const by = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -sideways, ArrowRight: sideways }[key];
  return Math.max(0, Math.min(n - 1, mark + by));
}

/** Round values for the lines of a grid, from 0 to at least `most`. */
function ticks(most, about = 5) {
  if (!(most > 0)) return [0];
  const rough = most / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, place) => place * step);
}

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
