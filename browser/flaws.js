// Returns the flaws of a page: what is cut off, what overlaps, and text whose contrast is below that of WCAG AA.
(() => {
  const flaws = [];
  const seen = (e) => e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
    e.getBoundingClientRect().width > 1;
  const nameOf = (e) => e.dataset.flag || e.id || e.className || e.tagName.toLowerCase();
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  // A color as red, green and blue over what is below it.
  const over = (color, below) => {
    pen.canvas.width = pen.canvas.height = 1;
    pen.fillStyle = below ? `rgb(${below.join()})` : "white";
    pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const ground = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    return layers.reduce((below, color) => over(color, below), null);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const checkContrast = (e, color, what) => {
    const below = ground(e), is = contrast(over(color, below), below);
    if (is < 4.5) flaws.push(`${what} has a contrast of ${is.toFixed(2)}, expected 4.5`);
  };

  const wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 0) flaws.push(`the page is ${wide} pixels too wide`);

  const fields = [...document.querySelectorAll("input, select, textarea, button")].filter(seen);
  for (const e of fields) {
    const style = getComputedStyle(e), isSelect = e.tagName === "SELECT";
    const placeholder = !e.value && e.placeholder;
    const text = isSelect ? [...e.options].map((o) => o.text) : [e.value, e.placeholder || ""];
    if (isSelect || e.type === "text") {
      pen.font = style.font;
      const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) -
        (isSelect ? 16 : e.list ? 20 : 0); // the arrow
      for (const line of text) {
        const width = pen.measureText(line).width;
        if (width > room + 0.5) {
          flaws.push(`${nameOf(e)} has ${room.toFixed(0)} pixels for "${line}", which takes ${width.toFixed(0)}`);
        }
      }
    }
    checkContrast(e, placeholder ? getComputedStyle(e, "::placeholder").color : style.color, `the text of ${nameOf(e)}`);
  }
  fields.forEach((a, i) => fields.slice(0, i).forEach((b) => {
    const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
    if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1) {
      flaws.push(`${nameOf(a)} overlaps ${nameOf(b)}`);
    }
  }));

  const said = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
    if (!text || !seen(e) || e.closest("script, style, select, option, textarea, template")) continue;
    const style = getComputedStyle(e), color = e.closest("svg") ? style.fill : style.color;
    const key = [e.tagName, e.className, color].join();
    if (said.has(key)) continue;
    said.add(key);
    checkContrast(e, color, `"${text.slice(0, 40)}"`);
  }
  return flaws;
})()
