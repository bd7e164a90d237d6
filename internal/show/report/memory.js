// Draws the devices of a plan: bars of phases, stacked by component, with the capacity as a line. What a component is
// made of stands below the bars, for the phase that was chosen. All data comes from the page itself.
"use strict";
(() => {
  const view = JSON.parse(document.getElementById("memory-data").textContent);
  const byId = (id) => document.getElementById(id);
  const className = (color) => view.classes[color];
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

  let device = 0, phase = 0;
  const charts = {};

  // The unit of an axis is the largest that its end has at least two of.
  function unitOf(most) {
    let unit = 0;
    while (unit < units.length - 1 && most >= 2 * 1024 ** (unit + 1)) unit++;
    return { size: 1024 ** unit, name: units[unit] };
  }

  // Chart.js takes steps of ten, which are odd in binary units: the axis counts units instead of bytes.
  function axis(most, unit) {
    return {
      stacked: true, min: 0, max: most / unit.size * 1.03,
      grid: { color: variable("rule") },
      ticks: { color: variable("soft"), maxRotation: 0, includeBounds: false,
        callback: (value) => Number(value.toPrecision(6)) + " " + unit.name },
    };
  }

  function capacityLine(capacity, text, unit) {
    return { id: "capacity", afterDatasetsDraw(chart) {
      if (!capacity) return;
      const { ctx, chartArea: area, scales } = chart;
      const x = scales.x.getPixelForValue(capacity / unit.size);
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = variable("bad");
      ctx.lineWidth = 1.5;
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(x, area.top);
      ctx.lineTo(x, area.bottom);
      ctx.stroke();
      ctx.font = "12px system-ui, sans-serif";
      ctx.textAlign = x > (area.left + area.right) / 2 ? "right" : "left";
      ctx.fillText("capacity " + text, x, area.top - 6);
      ctx.restore();
    } };
  }

  function draw(name, height, labels, datasets, options) {
    charts[name]?.destroy();
    byId(name).parentElement.style.height = height + "px";
    charts[name] = new Chart(byId(name), {
      type: "bar", data: { labels, datasets },
      options: {
        indexAxis: "y", animation: false, responsive: true, maintainAspectRatio: false,
        layout: { padding: { top: 20 } },
        scales: { x: options.axis, y: { stacked: true, grid: { display: false },
          ticks: { color: variable("text"), autoSkip: false } } },
        plugins: { legend: { display: false }, tooltip: { callbacks: { label: options.label } } },
        onClick: options.onClick,
      },
      plugins: options.plugins,
    });
  }

  function drawPhases() {
    const d = view.devices[device];
    const most = Math.max(d.capacity, ...d.phases.map((p) => p.used));
    const unit = unitOf(most);
    const sums = view.palette.map(() => d.phases.map(() => 0));
    d.phases.forEach((p, i) => p.held.forEach((h) => { sums[h.color][i] += h.bytes; }));
    const datasets = [];
    sums.forEach((row, color) => {
      if (!row.some((bytes) => bytes > 0)) return;
      datasets.push({ label: view.palette[color], color, data: row.map((bytes) => bytes / unit.size),
        backgroundColor: variable(className(color)), maxBarThickness: 22 });
    });
    draw("phases", 60 + 30 * d.phases.length, d.phases.map((p) => p.name), datasets, {
      axis: axis(most, unit),
      label: (item) => `${item.dataset.label}: ${item.raw.toPrecision(3)} ${unit.name}`,
      plugins: [capacityLine(d.capacity, d.capacity_text, unit)],
      onClick: (event, elements) => {
        if (elements.length === 0) return;
        choosePhase(elements[0].index);
        open((h) => h.color === datasets[elements[0].datasetIndex].color);
      },
    });
    byId("legend").replaceChildren(...datasets.map((set) => {
      const item = document.createElement("li"), mark = document.createElement("i");
      mark.className = className(set.color);
      item.append(mark, set.label);
      return item;
    }));
  }

  function drawAllocator() {
    const d = view.devices[device], parts = d.phases[phase].allocator ?? [];
    byId("allocator-box").hidden = parts.length === 0;
    if (parts.length === 0) return;
    const most = Math.max(d.capacity, d.phases[phase].used), unit = unitOf(most);
    const colors = ["c0", "c1", "unused", "other"];
    const labels = parts.map((part) => [part.title, part.text]);
    draw("allocator", 50 + 34 * parts.length, labels, [{ maxBarThickness: 18,
      data: parts.map((part, i) => {
        const before = parts.slice(0, i).reduce((sum, earlier) => sum + earlier.bytes, 0);
        return [before / unit.size, (before + part.bytes) / unit.size];
      }),
      backgroundColor: parts.map((_, i) => variable(colors[i])) }], {
      axis: axis(most, unit),
      label: (item) => labels[item.dataIndex].join(": "),
      plugins: [capacityLine(d.capacity, d.capacity_text, unit)],
    });
  }

  // element makes an element with text or children.
  function element(name, ...children) {
    const made = document.createElement(name);
    made.append(...children);
    return made;
  }

  function listHeld() {
    const p = view.devices[device].phases[phase];
    byId("held-title").textContent = `Held in ${p.name}: ${p.text}`;
    byId("held").replaceChildren(...p.held.map((h) => {
      const mark = element("i");
      mark.className = className(h.color);
      const share = p.used > 0 ? 100 * h.bytes / p.used : 0;
      const facts = element("dl", element("dt", "bytes"), element("dd", h.bytes.toLocaleString("en")));
      if (h.why) facts.append(element("dt", "why"), element("dd", h.why));
      if (h.formula) facts.append(element("dt", "formula"), ...h.formula.map((line) => element("dd", line)));
      if (h.source) facts.append(element("dt", "source"), element("dd", h.source));
      return element("details", element("summary", mark, element("b", h.title), element("span", h.text),
        element("span", (share < 10 ? share.toFixed(1) : share.toFixed(0)) + " %")), facts);
    }));
  }

  // open shows the facts of components, and scrolls to the first.
  function open(isMeant) {
    const p = view.devices[device].phases[phase];
    let first = null;
    [...byId("held").children].forEach((item, i) => {
      item.open = isMeant(p.held[i]);
      first ??= item.open ? item : null;
    });
    first?.scrollIntoView({ block: "nearest" });
  }

  function choosePhase(i) {
    phase = i;
    byId("phase").value = String(i);
    drawAllocator();
    listHeld();
  }

  function chooseDevice(i) {
    device = i;
    const d = view.devices[i];
    byId("phase").replaceChildren(...d.phases.map((p, k) => new Option(k === d.peak ? p.name + " (peak)" : p.name, k)));
    drawPhases();
    choosePhase(d.peak);
  }

  function redraw() {
    drawPhases();
    drawAllocator();
  }

  byId("device").addEventListener("change", (event) => chooseDevice(Number(event.target.value)));
  byId("phase").addEventListener("change", (event) => choosePhase(Number(event.target.value)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is light.
  addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); redraw(); });

  byId("memory").hidden = false;
  chooseDevice(0);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
