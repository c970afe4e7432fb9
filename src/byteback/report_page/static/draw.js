// SPDX-License-Identifier: Apache-2.0
// The ground that charts stand on: elements, scales, axes, and one way to read values by mouse, finger and keyboard.
'use strict';

const NS = 'http://www.w3.org/2000/svg';

/** A new SVG element inside `parent`. */
function shape(parent, name, attributes = {}, text = null) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

/** A new HTML element inside `parent`. */
function element(parent, name, attributes = {}, text = null) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// ---- numbers ----

/** A number for people: three digits, and powers of ten where they are shorter. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size < 0.001 || size >= 1e6) return value.toExponential(digits - 1).replace(/\.?0+e/, 'e').replace('e+', 'e').replace('-', '−').replace('e-', 'e−');
  if (size >= 1000) return Math.round(value).toLocaleString('en-US');
  return String(Number(value.toPrecision(digits))).replace('-', '−');
}

const percent = (value, digits = 2) => (value === null || value === undefined ? '–' : `${(100 * value).toFixed(digits)} %`);

/** Four to six round numbers that span low to high. */
function ticks(low, high, about = 5) {
  const rough = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Whole numbers only, for epochs, unless there are none. */
function wholeTicks(low, high, about) {
  const whole = ticks(low, high, Math.min(about, Math.max(1, high - low))).filter(Number.isInteger);
  return whole.length ? whole : ticks(low, high, about);
}

/** Powers of ten between low and high, thinned to at most `most`; 2 and 5 times as well where there are few. */
function logTicks(low, high, most = 6) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / most));
  const found = [];
  for (let e = first - 1; e <= last; e++) {
    const extra = last - first < 2 && most > 3 ? [1, 2, 5] : [1];
    for (const m of extra) if ((e - first) % every === 0 || m > 1) found.push(m * 10 ** e);
  }
  return found.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

/** value → pixel, linear or logarithmic. */
function scale([low, high], [from, to], log = false) {
  const f = log ? Math.log10 : (v) => v;
  const a = f(low), b = f(high);
  return (value) => (b === a ? (from + to) / 2 : from + ((f(value) - a) / (b - a)) * (to - from));
}

/** The lowest and highest of the numbers; `fallback` where there is none. */
function extent(values, fallback = [0, 1]) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && v !== undefined) { if (v < low) low = v; if (v > high) high = v; }
  return low <= high ? [low, high] : fallback;
}

// Viridis, which grows lighter evenly, for any colour vision.
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

/** 0..1 → a colour. */
function viridis(t) {
  const x = Math.min(1, Math.max(0, t)) * (VIRIDIS.length - 1), i = Math.min(VIRIDIS.length - 2, Math.floor(x));
  return `rgb(${VIRIDIS[i].map((c, k) => Math.round(c + (VIRIDIS[i + 1][k] - c) * (x - i))).join(' ')})`;
}

const dark = matchMedia('(prefers-color-scheme: dark)');

/** A colour for the depth of a layer, 0..1: viridis without its end that the paper swallows. */
const depth = (t) => viridis(dark.matches ? 0.28 + 0.72 * t : 0.86 * t);

// ---- a chart: drawn at its real width, and again when that changes ----

/** A figure in `holder` whose SVG is drawn by draw(svg, width); returns nothing, keeps itself fresh. */
function figure(holder, { title, note = '', label, kind }, draw) {
  const box = element(holder, 'figure', { 'data-chart': kind });
  const caption = element(box, 'figcaption', {}, title);
  if (note) element(caption, 'small', {}, note);
  const svg = shape(box, 'svg', { tabindex: 0, role: 'img', 'aria-label': `${label || title}. Arrow keys read single values.` });
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(svg.clientWidth);
    if (!width || width === drawn) return;
    drawn = width;
    svg.replaceChildren();
    const height = draw(svg, width);
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;
  };
  redraw();
  new ResizeObserver(redraw).observe(svg);
}

/** Text no wider than `room` pixels; what is too long loses its beginning, for names of layers differ at their end. */
function fitted(parent, attributes, text, room) {
  const node = shape(parent, 'text', attributes, text);
  for (let cut = 1; cut < text.length && node.getComputedTextLength() > room; cut++) node.textContent = `…${text.slice(cut)}`;
  return node;
}

/** How wide the widest of these texts is. */
function widest(svg, texts) {
  const probe = shape(svg, 'text', {}, '');
  const width = Math.max(0, ...texts.map((text) => { probe.textContent = text; return probe.getComputedTextLength(); }));
  probe.remove();
  return Math.ceil(width);
}

// ---- reading values ----

const tip = document.getElementById('tip');
let focused = null; // puts the tip of the chart that the keyboard reads back to its place

function showTip({ head, rows }, x, y) {
  tip.replaceChildren();
  element(tip, 'b', {}, head);
  for (const { color, name, value } of rows) {
    const row = element(tip, 'div'), left = element(row, 'span');
    if (color) element(left, 'i').style.background = color;
    left.append(name);
    element(row, 'span', {}, value);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(6, Math.min(x + 14, room - width - 6))}px`;
  tip.style.top = `${y - height - 14 > 4 ? y - height - 14 : y + 18}px`;
}

/**
 * Values at stops {x, y, tip, box?} of a chart: the nearest to the pointer, or by arrow keys. `weigh` says how much a
 * distance along x and along y counts; a stop with a box is outlined, another gets a line (weigh y = 0) or a ring.
 */
function readable(svg, stops, weigh, area) {
  let cursor = null, at = -1;
  const hide = () => { tip.hidden = true; cursor?.remove(); cursor = null; at = -1; };
  const show = (i, clientX, clientY) => {
    const stop = stops[i];
    if (!stop) return;
    cursor?.remove();
    at = i;
    cursor = stop.box
      ? shape(svg, 'rect', { class: 'cursor', ...stop.box })
      : weigh[1] === 0
        ? shape(svg, 'line', { class: 'cursor', x1: stop.x, x2: stop.x, y1: area.top, y2: area.bottom, opacity: 0.45 })
        : shape(svg, 'circle', { class: 'cursor', cx: stop.x, cy: stop.y, r: 6 });
    const frame = svg.getBoundingClientRect();
    showTip(stop.tip, clientX ?? frame.left + stop.x, clientY ?? frame.top + stop.y);
  };
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    let best = -1, least = Infinity;
    stops.forEach((stop, i) => {
      const d = weigh[0] * (stop.x - x) ** 2 + weigh[1] * (stop.y - y) ** 2;
      if (d < least) { least = d; best = i; }
    });
    show(best, event.clientX, event.clientY);
  };
  const step = (dx, dy) => {
    if (at < 0) return show(0);
    let best = -1, least = Infinity;
    stops.forEach((stop, i) => {
      const x = stop.x - stops[at].x, y = stop.y - stops[at].y, ahead = x * dx + y * dy, aside = Math.abs(x * dy) + Math.abs(y * dx);
      if (i !== at && ahead > 0.01 && ahead + 4 * aside < least) { least = ahead + 4 * aside; best = i; }
    });
    if (best >= 0) show(best);
  };
  svg.onpointermove = nearest;
  svg.onpointerdown = nearest;
  svg.onpointerleave = (event) => { if (event.pointerType === 'mouse') hide(); };
  svg.onfocus = () => {
    if (svg.matches(':focus-visible')) show(0);
    focused = () => { if (at >= 0) show(at); };
  };
  svg.onblur = () => { hide(); focused = null; };
  svg.onkeydown = (event) => {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === 'Escape') hide();
    if (move) { event.preventDefault(); step(...move); }
  };
}

document.addEventListener('pointerdown', (event) => { if (!event.target.closest?.('figure svg')) tip.hidden = true; });
document.addEventListener('scroll', () => { if (focused) focused(); else tip.hidden = true; }, { passive: true });
