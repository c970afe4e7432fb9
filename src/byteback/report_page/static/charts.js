// SPDX-License-Identifier: Apache-2.0
// The kinds of charts: lines, bars, heat maps, histograms, dots by class, ranks.

const BOTTOM = 38; // room for the ticks and the name of the x axis

/** Axes with ticks; returns {x, y, area}. Room on the left follows the widest label. */
function axes(svg, width, height, { xs, ys, xName, xTicks, xText = number, yTicks, yText, log = false, room = 10 }) {
    const left =
        widest(
            svg,
            yTicks.map((t) => yText(t)),
        ) + 8;
    const area = { left, right: width - room, top: 10, bottom: height - BOTTOM };
    const x = scale(xs, [area.left, area.right]),
        y = scale(ys, [area.bottom, area.top], log);
    for (const t of yTicks) {
        shape(svg, 'line', { class: 'grid-line', x1: area.left, x2: area.right, y1: y(t), y2: y(t) });
        shape(svg, 'text', { x: area.left - 6, y: y(t) + 4, 'text-anchor': 'end' }, yText(t));
    }
    shape(svg, 'line', { class: 'axis-line', x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom });
    for (const t of xTicks) shape(svg, 'text', { x: x(t), y: area.bottom + 16, 'text-anchor': 'middle' }, xText(t));
    shape(svg, 'text', { x: (area.left + area.right) / 2, y: height - 4, 'text-anchor': 'middle' }, xName);
    return { x, y, area };
}

const EPOCHS = {
    name: 'epochs trained',
    ticks: (xs, width) => wholeTicks(...xs, width < 420 ? 5 : 8),
    text: (e) => number(e),
    head: (e) => `epoch ${number(e)}`,
};

/**
 * series: {name, color, dash, faint, xs, ys}; the strong ones are read at each x, the faint ones are only drawn. `log` asks for
 * a logarithmic axis, where the values span enough for it; `zero` marks the line of zero; `x` says what the x axis is, and
 * `range` sets that of y.
 */
function lineChart(
    holder,
    { title, note, series, text = number, log = false, zero = false, kind = 'lines', most = 8, x: along = EPOCHS, range = null },
) {
    const strong = series.filter((s) => !s.faint);
    const all = series.flatMap((s) => s.ys).filter((v) => v !== null);
    let [low, high] = range ?? extent(zero ? [0, ...all] : all);
    log = log && low > 0 && high / low > 20;
    if (!log && !range) {
        const margin = (high - low || Math.abs(high) || 1) * 0.06;
        low -= margin;
        high += margin;
    }
    const epochs = [...new Set(strong.flatMap((s) => s.xs))].sort((a, b) => a - b);
    figure(holder, { title, note: note + (log ? ', logarithmic' : ''), kind }, (svg, width) => {
        const height = width < 420 ? 230 : 270;
        const xs = extent(epochs, [0, 1]);
        const { x, y, area } = axes(svg, width, height, {
            xs,
            ys: [low, high],
            log,
            xName: along.name,
            xTicks: along.ticks(xs, width),
            xText: along.text,
            room: along.room,
            yTicks: log ? logTicks(low, high) : ticks(low, high),
            yText: text,
        });
        if (zero) shape(svg, 'line', { class: 'threshold', x1: area.left, x2: area.right, y1: y(0), y2: y(0) });
        for (const s of [...series.filter((s) => s.faint), ...strong]) {
            const pieces = [];
            let pen = false;
            s.xs.forEach((e, i) => {
                if (s.ys[i] === null) {
                    pen = false;
                    return;
                }
                pieces.push(`${pen ? 'L' : 'M'}${x(e).toFixed(1)} ${y(s.ys[i]).toFixed(1)}`);
                pen = true;
            });
            shape(svg, 'path', {
                class: `mark mark-line${s.faint ? ' faint' : ''}`,
                d: pieces.join(''),
                stroke: s.color,
                ...(s.dash ? { 'stroke-dasharray': s.dash } : {}),
            });
            if (!s.faint && s.xs.length === 1 && s.ys[0] !== null)
                shape(svg, 'circle', { class: 'mark', cx: x(s.xs[0]), cy: y(s.ys[0]), r: 4, fill: s.color });
        }
        const stops = epochs.map((e) => {
            const rows = strong
                .map((s) => ({ color: s.color, name: s.name, raw: s.ys[s.xs.indexOf(e)] ?? null }))
                .filter((r) => r.raw !== null);
            rows.sort((a, b) => b.raw - a.raw);
            const shown = rows.length > most ? [...rows.slice(0, most / 2), ...rows.slice(-most / 2)] : rows;
            const left = rows.length - shown.length;
            const lines = shown.map((r) => ({ ...r, value: text(r.raw, 4) }));
            if (left) lines.splice(most / 2, 0, { name: `… ${left} more`, value: '' });
            return { x: x(e), y: area.top, tip: { head: along.head(e), rows: lines } };
        });
        readable(svg, stops, [1, 0], area);
        return height;
    });
}

/** rows: {name, color, value, text}; horizontal, with the name above its bar, so that long names fit on a phone. */
function barChart(holder, { title, note, rows }) {
    figure(holder, { title, note, kind: 'bars' }, (svg, width) => {
        const high = Math.max(...rows.map((r) => r.value)),
            step = 46;
        const room =
            widest(
                svg,
                rows.map((r) => r.text),
            ) + 10;
        const stops = rows.map((r, i) => {
            const top = 6 + i * step,
                long = Math.max(2, (r.value / high) * (width - room));
            fitted(svg, { x: 0, y: top + 12, class: 'strong' }, r.name, width);
            shape(svg, 'rect', { class: 'mark', x: 0, y: top + 18, width: long, height: 16, rx: 3, fill: r.color });
            shape(svg, 'text', { x: long + 6, y: top + 31 }, r.text);
            return { x: long, y: top + 26, box: { x: 0.7, y: top + 18, width: long, height: 16, rx: 3 }, tip: r.tip };
        });
        readable(svg, stops, [0, 1]);
        return 6 + rows.length * step;
    });
}

/**
 * Heat map: a row per layer, a column per epoch. `range` and `log` are shared by charts that stand side by side.
 */
function heatMap(holder, { title, note, names, columns, values, range, log = false, text = number, what }) {
    figure(holder, { title, note, kind: 'heat', label: `${title}: ${what} by layer and epoch` }, (svg, width) => {
        const step = names.length > 40 ? 11 : names.length > 24 ? 14 : 19;
        const every = step < 13 ? Math.ceil(13 / step) : 1;
        const left = Math.min(widest(svg, names), Math.floor(width * 0.42)) + 8;
        const area = { left, right: width - 2, top: 4, bottom: 4 + step * names.length };
        const wide = (area.right - area.left) / columns.length;
        const t = scale(range, [0, 1], log);
        const stops = [];
        names.forEach((name, row) => {
            const top = area.top + row * step;
            if (row % every === 0) fitted(svg, { x: left - 6, y: top + step / 2 + 4, 'text-anchor': 'end' }, name, left - 8);
            columns.forEach((epoch, column) => {
                const value = values[row][column];
                if (value === null || value === undefined) return;
                const box = { x: area.left + column * wide, y: top, width: wide, height: step };
                shape(svg, 'rect', {
                    class: 'mark',
                    x: box.x.toFixed(2),
                    y: top,
                    width: (wide + 0.3).toFixed(2),
                    height: step - (step > 12 ? 1 : 0),
                    fill: viridis(log && value <= 0 ? 0 : t(value)),
                });
                stops.push({
                    x: box.x + wide / 2,
                    y: top + step / 2,
                    box,
                    tip: { head: name, rows: [{ name: `${what}, epoch ${epoch}`, value: text(value) }] },
                });
            });
        });
        const labels = wholeTicks(columns[0], columns[columns.length - 1], 5);
        for (const e of labels) {
            const i = columns.findIndex((c) => c >= e);
            if (i >= 0)
                shape(
                    svg,
                    'text',
                    { x: area.left + (i + 0.5) * wide, y: area.bottom + 15, 'text-anchor': 'middle' },
                    number(e),
                );
        }
        shape(svg, 'text', { x: (area.left + area.right) / 2, y: area.bottom + 31, 'text-anchor': 'middle' }, 'epochs trained');
        readable(svg, stops, [1, 1], area);
        return colorBar(svg, width, area.bottom + 42, range, log, text);
    });
}

/** What the colours of a heat map mean; returns the height used so far. */
function colorBar(svg, width, top, [low, high], log, text) {
    const left = 6,
        right = width - 6,
        parts = 48,
        wide = (right - left) / parts;
    for (let i = 0; i < parts; i++)
        shape(svg, 'rect', { x: left + i * wide, y: top, width: wide + 0.4, height: 8, fill: viridis((i + 0.5) / parts) });
    const middle = log ? Math.sqrt(low * high) : (low + high) / 2;
    for (const [value, at, anchor] of [
        [low, left, 'start'],
        [middle, width / 2, 'middle'],
        [high, right, 'end'],
    ]) {
        shape(svg, 'text', { x: at, y: top + 22, 'text-anchor': anchor }, text(value));
    }
    return top + 28;
}

/** A small histogram from -edge to +edge. `top` is the highest share among the panels beside it. */
function histogram(holder, { title, note, edge, shares, color, top, log, least }) {
    figure(holder, { title, note, kind: 'histogram' }, (svg, width) => {
        const height = 124,
            bottom = height - 20,
            low = log ? least : 0;
        const marks = log ? logTicks(low, top, 3) : [0, top],
            text = (t) => (log ? number(t, 1) : percent(t, 0));
        const left = widest(svg, marks.map(text)) + 5,
            right = width - 1,
            wide = (right - left) / shares.length;
        const y = scale([low, top], [bottom, 8], log),
            at = (i) => (left + i * wide).toFixed(1);
        const path = [`M${left} ${bottom}`];
        shares.forEach((share, i) => {
            const level = (share > low ? y(share) : bottom).toFixed(1);
            path.push(`L${at(i)} ${level}L${at(i + 1)} ${level}`);
        });
        for (const t of marks) {
            shape(svg, 'line', { class: 'grid-line', x1: left, x2: right, y1: y(t), y2: y(t) });
            shape(svg, 'text', { x: left - 4, y: y(t) + 4, 'text-anchor': 'end' }, text(t));
        }
        shape(svg, 'path', { class: 'mark', d: `${path.join('')}L${right} ${bottom}Z`, fill: color });
        shape(svg, 'line', { class: 'axis-line', x1: left, x2: right, y1: bottom, y2: bottom });
        shape(svg, 'text', { x: (left + right) / 2, y: height - 5, 'text-anchor': 'middle' }, `0 ± ${number(edge, 2)}`);
        const stops = shares.map((share, i) => {
            const from = edge * ((2 * i) / shares.length - 1),
                to = edge * ((2 * (i + 1)) / shares.length - 1);
            return {
                x: left + (i + 0.5) * wide,
                y: share > low ? y(share) : bottom,
                tip: {
                    head: title,
                    rows: [{ name: `${number(from, 2)} to ${number(to, 2)}`, value: percent(share, share < 0.001 ? 4 : 2) }],
                },
            };
        });
        readable(svg, stops, [1, 0], { top: 4, bottom });
        return height;
    });
}

/** groups: {name, dots: [{value, color, tip}]}: a line of dots for each group, along a shared x axis. */
function dotChart(holder, { title, note, groups, xName, high, threshold, thresholdText }) {
    figure(holder, { title, note, kind: 'dots' }, (svg, width) => {
        const step = 34,
            top = 22,
            left =
                Math.min(
                    widest(
                        svg,
                        groups.map((g) => g.name),
                    ),
                    Math.floor(width * 0.45),
                ) + 14;
        const area = { left, right: width - 12, top, bottom: top + step * groups.length };
        const x = scale([0, high], [area.left, area.right]);
        for (const t of ticks(0, high, width < 480 ? 3 : 6)) {
            shape(svg, 'line', { class: 'grid-line', x1: x(t), x2: x(t), y1: area.top, y2: area.bottom });
            shape(svg, 'text', { x: x(t), y: area.bottom + 16, 'text-anchor': 'middle' }, number(t));
        }
        if (threshold <= high) {
            shape(svg, 'line', { class: 'threshold', x1: x(threshold), x2: x(threshold), y1: top - 6, y2: area.bottom });
            shape(
                svg,
                'text',
                { x: Math.min(x(threshold), width), y: 11, 'text-anchor': x(threshold) > width * 0.7 ? 'end' : 'middle' },
                thresholdText,
            );
        }
        const stops = [];
        groups.forEach((group, row) => {
            const y = area.top + (row + 0.5) * step;
            fitted(svg, { x: left - 12, y: y + 4, 'text-anchor': 'end', class: 'strong' }, group.name, left - 12);
            shape(svg, 'line', { class: 'grid-line', x1: area.left, x2: area.right, y1: y, y2: y });
            group.dots.forEach((dot, i) => {
                const lift = ((i % 3) - 1) * Math.min(5, group.dots.length - 1);
                shape(svg, 'circle', {
                    class: 'mark',
                    cx: x(dot.value),
                    cy: y + lift,
                    r: 5,
                    fill: dot.color,
                    stroke: 'var(--card)',
                });
                stops.push({ x: x(dot.value), y: y + lift, tip: dot.tip });
            });
        });
        shape(svg, 'text', { x: (area.left + area.right) / 2, y: area.bottom + 34, 'text-anchor': 'middle' }, xName);
        readable(svg, stops, [1, 1], area);
        return area.bottom + 40;
    });
}
