// Makes the charts of a page zoom, pan, smooth and show values. Draws what svg.py has drawn, for other ranges.
"use strict";
(() => {
  const LEFT = 68, RIGHT = 10, TOP = 10, BELOW = 24, COLOURS = 8, RARE = 3;
  const SVG = "http://www.w3.org/2000/svg";
  const charts = [];
  let range = null; // [first, last] step that all charts show; null: everything

  const make = (name, attributes = {}, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };

  const html = (name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  const ticks = (low, high, most) => {
    if (!(high > low)) return [low];
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) found.push(n * step);
    return found;
  };

  const logTicks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const factor of [1, 2, 5]) {
        const value = factor * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    if (found.length < 2) return ticks(low, high, 5);
    const every = Math.ceil(found.length / 8);
    return found.filter((_, place) => place % every === 0);
  };

  // So many digits tell neighbours on an axis apart.
  const digitsOf = (values) => values.length < 2 || !(values[1] > values[0]) ? 4 :
    Math.min(15, Math.max(4, 1 + Math.ceil(Math.log10(Math.max(...values.map(Math.abs)) / (values[1] - values[0])))));

  const shown = (value, share, digits = 4) => {
    if (share) return `${+(100 * value).toPrecision(digits)} %`;
    const size = Math.abs(value);
    if (value === 0) return "0";
    for (const [least, by, letter] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
      if (size >= least) return `${+(value / by).toPrecision(digits)}${letter}`;
    return size < 1e-3 ? (+value.toPrecision(digits)).toExponential() : `${+value.toPrecision(digits)}`;
  };

  // As TensorBoard does: a running mean that forgets, corrected for its beginning.
  const smoothed = (values, by) => {
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = by * mean + (1 - by) * value;
      weight = by * weight + (1 - by);
      return mean / weight;
    });
  };

  const colourOf = (line) => `c${line.colour % COLOURS}${line.colour >= COLOURS ? " dashed" : ""}`;

  // The place of the value in a sorted list that is nearest to x.
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  };

  class Chart {
    constructor(figure, number) {
      this.figure = figure;
      this.svg = figure.querySelector("svg");
      this.data = JSON.parse(figure.querySelector("script").textContent);
      [this.width, this.height] = [this.svg.viewBox.baseVal.width, this.svg.viewBox.baseVal.height];
      this.hidden = new Set();
      this.smoothing = 0;
      this.log = false;
      this.clip = `clip-${number}`;
      this.full = this.height;
      const steps = this.data.lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
      this.whole = [Math.min(...steps), Math.max(...steps)];
      if (this.whole[0] === this.whole[1]) this.whole[1]++;
      this.addControls();
      this.addLegend();
      this.addPointer();
      this.fit();
      new ResizeObserver(() => this.fit()).observe(this.svg);
    }

    // Draws in the pixels of the window, so that texts keep their size in a narrow one.
    fit() {
      const width = Math.round(this.svg.getBoundingClientRect().width);
      if (!width || (width === this.width && this.range)) return;
      this.width = width;
      this.height = Math.round(Math.min(this.full, Math.max(180, 0.55 * width)));
      [this.innerWidth, this.innerHeight] = [this.width - LEFT - RIGHT, this.height - TOP - BELOW];
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      this.draw();
    }

    addControls() {
      const box = html("span", "controls");
      if (this.data.smooths) {
        const label = html("label", "", "smoothing "), slider = html("input");
        Object.assign(slider, { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
        slider.addEventListener("input", () => { this.smoothing = +slider.value; this.draw(); });
        label.append(slider);
        box.append(label);
      }
      if (this.data.logs) {
        const label = html("label", "", " log scale"), check = html("input");
        check.type = "checkbox";
        check.addEventListener("change", () => { this.log = check.checked; this.draw(); });
        label.prepend(check);
        box.append(label);
      }
      if (box.childElementCount) this.figure.querySelector("figcaption").append(box);
    }

    addLegend() {
      this.figure.querySelectorAll(".legend li").forEach((item, place) => {
        item.addEventListener("click", () => {
          item.classList.toggle("off");
          if (!this.hidden.delete(place)) this.hidden.add(place);
          this.draw();
        });
      });
    }

    addPointer() {
      this.tip = html("div", "tip");
      this.tip.hidden = true;
      this.figure.append(this.tip);
      let from = null, pan = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        this.svg.setPointerCapture(event.pointerId);
        if (event.shiftKey && range) pan = { x: this.place(event), range: [...range] };
        else from = this.place(event);
      });
      this.svg.addEventListener("pointermove", (event) => {
        if (pan) {
          const by = ((pan.x - this.place(event)) / this.innerWidth) * (pan.range[1] - pan.range[0]);
          show([pan.range[0] + by, pan.range[1] + by]);
          return;
        }
        this.tell(event);
        if (from !== null) this.choose(from, this.place(event));
      });
      const end = (event) => {
        if (from !== null) {
          const to = this.place(event);
          const picked = [this.step(Math.min(from, to)), this.step(Math.max(from, to))];
          if (Math.abs(to - from) > 6) show(picked);
          else this.choose(0, 0);
        }
        from = pan = null;
      };
      this.svg.addEventListener("pointerup", end);
      this.svg.addEventListener("pointercancel", () => { from = pan = null; this.choose(0, 0); });
      this.svg.addEventListener("pointerleave", () => this.quiet());
      this.svg.addEventListener("dblclick", () => show(null));
    }

    // Pixels of the picture's own width.
    place(event) {
      const box = this.svg.getBoundingClientRect();
      const scale = Math.min(box.width / this.width, box.height / this.height);
      const x = (event.clientX - box.left - (box.width - this.width * scale) / 2) / scale;
      return Math.max(LEFT, Math.min(this.width - RIGHT, x));
    }

    step(x) { return this.range[0] + ((x - LEFT) / this.innerWidth) * (this.range[1] - this.range[0]); }
    x(step) { return LEFT + ((step - this.range[0]) / (this.range[1] - this.range[0])) * this.innerWidth; }
    y(value) {
      const f = this.log ? Math.log10 : (v) => v;
      const [low, high] = this.span.map(f);
      const share = this.log && value <= 0 ? -1 : (f(value) - low) / (high - low);
      return TOP + this.innerHeight * (1 - Math.max(-1, Math.min(2, share)));
    }

    // What is seen of a line: one point more on either side, so that it goes on to the edge.
    seen(line) {
      let first = 0, last = line.x.length - 1;
      while (first < last && line.x[first + 1] < this.range[0]) first++;
      while (last > first && line.x[last - 1] > this.range[1]) last--;
      return [first, last + 1];
    }

    draw() {
      this.range = range || this.whole;
      const visible = this.data.lines.map((line, place) => ({ line, place })).filter((l) => !this.hidden.has(l.place));
      for (const own of visible) {
        own.values = this.smoothing ? smoothed(own.line.y, this.smoothing) : own.line.y;
        own.bounds = this.seen(own.line);
      }
      this.visible = visible;
      this.setSpan(visible);
      const parts = [make("clipPath", { id: this.clip })];
      parts[0].append(make("rect", { x: LEFT - 3, y: TOP - 2, width: this.innerWidth + 6, height: this.innerHeight + 4 }));
      this.axes(parts);
      const plot = make("g", { "clip-path": `url(#${this.clip})` });
      for (const step of this.data.marks)
        if (step >= this.range[0] && step <= this.range[1])
          plot.append(make("path", { class: "mark", d: `M${this.x(step)} ${TOP}V${this.height - BELOW}` }));
      for (const own of visible) this.line(plot, own);
      this.cursor = make("path", { class: "cursor", d: "" });
      this.chosen = make("rect", { class: "chosen", y: TOP, height: this.innerHeight, width: 0 });
      this.svg.replaceChildren(...parts, plot, this.cursor, this.chosen);
    }

    // What the lines reach, and their ranges but for a few spikes.
    extent({ line, values, bounds }) {
      const found = values.slice(...bounds);
      if (!line.low || this.smoothing) return found;
      const spare = Math.floor((found.length * RARE) / 100);
      const sorted = (all) => all.slice(...bounds).sort((a, b) => a - b);
      return [...found, sorted(line.low)[spare], sorted(line.high)[found.length - 1 - spare]];
    }

    setSpan(visible) {
      const values = visible.flatMap((own) => this.extent(own));
      if (this.data.level && !range) values.push(this.data.level[1]);
      const used = this.log ? values.filter((value) => value > 0) : values;
      let low = Infinity, high = -Infinity;
      for (const value of used) { low = Math.min(low, value); high = Math.max(high, value); }
      if (!used.length) [low, high] = this.log ? [0.1, 1] : [0, 1];
      if (this.log) this.span = low < high ? [low / 1.05, high * 1.05] : [low / 2, high * 2];
      else {
        const room = 0.05 * (high - low) || Math.abs(high) * 0.1 || 1;
        this.span = [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
      }
    }

    axes(parts) {
      const values = this.log ? logTicks(...this.span) : ticks(...this.span, 5), digits = digitsOf(values);
      for (const value of values) {
        const y = this.y(value);
        parts.push(make("path", { class: "grid", d: `M${LEFT} ${y}H${this.width - RIGHT}` }));
        parts.push(make("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, shown(value, this.data.share, digits)));
      }
      for (const step of ticks(...this.range, Math.floor(this.width / 60)))
        if (Number.isInteger(step))
          parts.push(make("text", { x: this.x(step), y: this.height - 6, "text-anchor": "middle" }, shown(step)));
      if (!this.data.level) return;
      const y = this.y(this.data.level[1]);
      if (y < TOP - 2 || y > this.height - BELOW + 2) return;
      parts.push(make("path", { class: "level", d: `M${LEFT} ${y}H${this.width - RIGHT}` }));
      parts.push(make("text", { class: "levelname", x: this.width - RIGHT, y: y - 4, "text-anchor": "end" },
        this.data.level[0]));
    }

    line(plot, { line, values, bounds: [first, last] }) {
      const colour = colourOf(line);
      const path = (ys) => {
        const found = [];
        for (let n = first; n < last; n++) found.push(`${this.x(line.x[n]).toFixed(1)} ${this.y(ys[n]).toFixed(1)}`);
        return found;
      };
      if (line.low && !this.smoothing) {
        const band = [...path(line.high), ...path(line.low).reverse()].join("L");
        plot.append(make("path", { class: `band ${colour}`, d: `M${band}Z` }));
      }
      if (this.smoothing)
        plot.append(make("path", { class: `line raw ${colour}`, d: `M${path(line.y).join("L")}` }));
      if (line.dots || last - first === 1)
        for (let n = first; n < last; n++)
          plot.append(make("circle", { class: colour, r: 3, cx: this.x(line.x[n]), cy: this.y(line.y[n]) }));
      plot.append(make("path", { class: `line ${colour}`, style: line.dash, d: `M${path(values).join("L")}` }));
    }

    choose(from, to) {
      this.chosen.setAttribute("x", Math.min(from, to));
      this.chosen.setAttribute("width", Math.abs(to - from));
    }

    // The values nearest to the pointer, beside it.
    tell(event) {
      const at = this.place(event), wanted = this.step(at);
      const found = this.visible.filter(({ line }) => line.x.length).map((own) => {
        const place = nearest(own.line.x, wanted);
        return { ...own, place, step: own.line.x[place] };
      });
      if (!found.length) return this.quiet();
      const closest = found.reduce((a, b) => (Math.abs(a.step - wanted) <= Math.abs(b.step - wanted) ? a : b));
      const x = this.x(closest.step);
      this.cursor.setAttribute("d", `M${x} ${TOP}V${this.height - BELOW}`);
      const rows = [html("div", "", `${this.data.along} ${shown(Math.round(closest.step))}`)];
      for (const { line, place, values } of found.slice(0, 20)) {
        const row = html("div"), swatch = html("span", `swatch c${line.colour % COLOURS}`);
        let text = ` ${line.name}: ${shown(values[place], this.data.share)}`;
        if (line.low && line.low[place] < line.high[place])
          text += ` (${shown(line.low[place], this.data.share)} to ${shown(line.high[place], this.data.share)})`;
        row.append(swatch, text);
        rows.push(row);
      }
      this.tip.replaceChildren(...rows);
      this.tip.hidden = false;
      const box = this.figure.getBoundingClientRect(), left = event.clientX - box.left;
      this.tip.style.top = `${event.clientY - box.top + 14}px`;
      if (left > box.width / 2) Object.assign(this.tip.style, { left: "auto", right: `${box.width - left + 12}px` });
      else Object.assign(this.tip.style, { left: `${left + 12}px`, right: "auto" });
    }

    quiet() {
      this.tip.hidden = true;
      this.cursor.setAttribute("d", "");
    }
  }

  const show = (wanted) => {
    const least = Math.min(...charts.map((chart) => chart.whole[0]));
    const most = Math.max(...charts.map((chart) => chart.whole[1]));
    if (wanted) {
      const size = Math.min(most - least, Math.max(2, wanted[1] - wanted[0]));
      const first = Math.max(least, Math.min(most - size, wanted[0]));
      wanted = [first, first + size];
    }
    range = wanted;
    document.documentElement.classList.toggle("zoomed", Boolean(range));
    for (const chart of charts) chart.draw();
  };

  document.documentElement.classList.add("js");
  document.querySelectorAll("figure.chart").forEach((figure, number) => charts.push(new Chart(figure, number)));
})();
