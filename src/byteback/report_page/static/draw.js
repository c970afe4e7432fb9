// SPDX-License-Identifier: Apache-2.0
// What all charts use: elements, numbers, scales, colours, and a figure that keeps its width.
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
    if (!Number.isFinite(value)) return '–';
    if (value === 0) return '0';
    const size = Math.abs(value);
    if (size < 0.001 || size >= 1e6)
        return value
            .toExponential(digits - 1)
            .replace(/\.?0+e/, 'e')
            .replace('e+', 'e')
            .replace('-', '−')
            .replace('e-', 'e−');
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
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
        found.push(Number((i * step).toPrecision(12)));
    return found;
}

/** Whole numbers only, for epochs, unless there are none. */
function wholeTicks(low, high, about) {
    const whole = ticks(low, high, Math.min(about, Math.max(1, high - low))).filter(Number.isInteger);
    return whole.length ? whole : ticks(low, high, about);
}

/** Powers of ten between low and high, thinned to at most `most`; 2 and 5 times as well where there are few. */
function logTicks(low, high, most = 6) {
    const first = Math.ceil(Math.log10(low) - 1e-9),
        last = Math.floor(Math.log10(high) + 1e-9);
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
    const a = f(low),
        b = f(high);
    return (value) => (b === a ? (from + to) / 2 : from + ((f(value) - a) / (b - a)) * (to - from));
}

/** The lowest and highest of the numbers; `fallback` where there is none. */
function extent(values, fallback = [0, 1]) {
    let low = Infinity,
        high = -Infinity;
    for (const v of values)
        if (v !== null && v !== undefined) {
            if (v < low) low = v;
            if (v > high) high = v;
        }
    return low <= high ? [low, high] : fallback;
}

// Viridis, which grows lighter evenly, for any colour vision.
const VIRIDIS = [
    [68, 1, 84],
    [71, 44, 122],
    [59, 81, 139],
    [44, 113, 142],
    [33, 144, 141],
    [39, 173, 129],
    [92, 200, 99],
    [170, 220, 50],
    [253, 231, 37],
];

/** 0..1 → a colour. */
function viridis(t) {
    const x = Math.min(1, Math.max(0, t)) * (VIRIDIS.length - 1),
        i = Math.min(VIRIDIS.length - 2, Math.floor(x));
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
    const svg = shape(box, 'svg', {
        tabindex: 0,
        role: 'img',
        'aria-label': `${label || title}. Arrow keys read single values.`,
    });
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
    for (let cut = 1; cut < text.length && node.getComputedTextLength() > room; cut++) {
        node.textContent = `…${text.slice(cut)}`;
    }
    return node;
}

/** How wide the widest of these texts is. */
function widest(svg, texts) {
    const probe = shape(svg, 'text', {}, '');
    const width = Math.max(
        0,
        ...texts.map((text) => {
            probe.textContent = text;
            return probe.getComputedTextLength();
        }),
    );
    probe.remove();
    return Math.ceil(width);
}
