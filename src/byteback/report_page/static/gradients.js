// SPDX-License-Identifier: Apache-2.0
// The papers' pictures of gradients: sharp and wide; by epoch; by layer; by place in a block; by channel.

const GAUSSIAN = 0.3; // a channel whose share of values beyond its standard deviation is higher counts as Gaussian
const LAPLACE = 0.243; // the same share for a Laplace distribution; a lower share means a sharper peak and longer tails

/** Panels of histograms that share one scale of heights. list: {title, note, edge, shares, color}. */
function panels(holder, list, log) {
    const box = element(holder, 'div', { class: 'panels' });
    const top = Math.max(...list.flatMap((p) => p.shares));
    const positive = list.flatMap((p) => p.shares).filter((s) => s > 0);
    const least = 10 ** Math.floor(Math.log10(Math.min(...positive)) - 0.01);
    for (const panel of list) histogram(box, { ...panel, top, least, log });
}

// What each part shows, in one or two sentences.
const SEE = {
    shape:
        'Gradients often have a sharp peak at zero and a few values far from it, while weights and inputs use their whole ' +
        'range. With one scale from −max to +max, most of the 8 bits are then unused.',
    epoch:
        'The range of the values and the width of the distribution change during training, so a clip must be updated ' +
        'from time to time.',
    layer: 'Layers differ in the same epoch, from the first (left, top) to the last, so each layer needs its own clip.',
    place:
        'Layers at the same place in their block may have similar gradients: the kind of a layer matters as much as its ' +
        'depth. Each dot is a layer; the colours go from the first to the last layer, as for the clips.',
    channel:
        'There are two classes of channels: bell shapes (Gaussian, blue), and sharp peaks with long tails (inverted T, orange). ' +
        'The second paper has one scale per channel, and a separate clip rule for each class.',
};

/** A part of the section: a title with the result, and a sentence about what is shown. */
function part(holder, title, see) {
    element(holder, 'h3', {}, title);
    element(holder, 'p', {}, see);
}

/** What a histogram says in few words. */
const inWords = (h) => `P(|g| > σ) = ${number(h.tail, 2)}`;

/** The newest histogram of a layer. */
function newest(seen, layer) {
    const all = seen.histograms[layer];
    return all[Math.max(...Object.keys(all).map(Number))];
}

/** All pictures of a recipe (its `pictures`), with one layer in front. */
function gradientPictures(holder, recipe, layer, log, color) {
    const seen = recipe.pictures;
    holder.replaceChildren();
    shapePictures(holder, seen, layer, log, color);
    epochPictures(holder, seen, layer, log, color);
    layerPictures(holder, seen, log, color);
    placePictures(holder, seen, layer, log, color);
    channelPictures(holder, seen.layers[layer], seen.channels[layer], log);
}

function shapePictures(holder, seen, layer, log, color) {
    const gradient = newest(seen, layer),
        { weight, input } = seen.last[layer],
        bins = gradient.shares.length;
    const kind = gradient.tail < LAPLACE ? 'Sharp and wide' : 'Close to a bell';
    const share = percent(gradient.shares[bins >> 1], 0);
    const inside = `${share} of the gradients of ${seen.layers[layer].name} are in the middle bin of ${bins}`;
    part(holder, `${kind}: ${inside}, the largest is ${number(gradient.edge / gradient.std)} σ away`, SEE.shape);
    const list = [
        { title: 'gradient', note: inWords(gradient), ...gradient, color },
        { title: 'weight', note: 'of the same layer', ...weight, color: 'var(--c0)' },
        { title: 'input', note: 'of the same layer', ...input, color: 'var(--c0)' },
    ];
    panels(holder, list, log);
}

function epochPictures(holder, seen, layer, log, color) {
    const all = Object.entries(seen.histograms[layer]).sort(([a], [b]) => a - b);
    const [from, to] = [all[0][1].tail, all[all.length - 1][1].tail];
    const same = Math.abs(to - from) < 0.1 * from;
    const moved = same ? 'stays as sharp' : to < from ? 'becomes sharper' : 'becomes less sharp';
    const name = seen.layers[layer].name;
    const title = `By epoch: ${name} ${moved}, P(|g| > σ) goes from ${number(from, 2)} to ${number(to, 2)}`;
    part(holder, all.length > 1 ? title : `By epoch: one histogram of ${name} so far`, SEE.epoch);
    const when = (e) => (e === '0' ? 'before training' : `after epoch ${e}`);
    panels(
        holder,
        all.map(([e, h]) => ({ title: when(e), note: inWords(h), ...h, color })),
        log,
    );
}

function layerPictures(holder, seen, log, color) {
    const names = seen.layers.map((l) => l.name),
        tails = lastTails(seen),
        known = tails.filter((t) => t !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const named = (t) => `${number(t, 2)} (${names[tails.indexOf(t)]})`;
    part(holder, `By layer: P(|g| > σ) is between ${named(low)} and ${named(high)}`, SEE.layer);
    const chosen = [...new Set([0, 1, 2, 3, 4, 5].map((i) => Math.round((i * (names.length - 1)) / 5)))];
    panels(
        holder,
        chosen.map((i) => ({ title: names[i], note: inWords(newest(seen, i)), ...newest(seen, i), color })),
        log,
    );
    const grid = element(holder, 'div', { class: 'grid two' });
    heatMap(grid, {
        title: 'Share of values beyond σ',
        note: '0.32 for a Gaussian; dark is sharp',
        what: 'P(|g| > σ)',
        names,
        columns: seen.epochs,
        values: seen.tail,
        range: [0, Math.max(0.35, ...seen.tail.flat())],
    });
    heatMap(grid, {
        title: 'Share of Gaussian channels',
        note: 'P(|g| > σ) above 0.3; the others are inverted T',
        what: 'Gaussian channels',
        names,
        columns: seen.epochs,
        values: seen.gaussian,
        range: [0, 1],
        text: (v) => percent(v, 0),
    });
}

/** P(|g| > σ) of every layer at the last look. */
const lastTails = (seen) => seen.tail.map((row) => row[row.length - 1]);

function placePictures(holder, seen, layer, log, color) {
    const tails = lastTails(seen),
        places = new Map();
    seen.layers.forEach((l, i) => {
        if (tails[i] !== null) places.set(l.place, [...(places.get(l.place) ?? []), i]);
    });
    const mean = (list) => list.reduce((sum, i) => sum + tails[i], 0) / list.length;
    const common = [...places].filter(([, list]) => list.length > 1); // a place that one layer has says little
    const ranked = (common.length > 1 ? common : [...places]).sort((a, b) => mean(a[1]) - mean(b[1]));
    const named = ([name, list], what) => `${name} is the ${what} (mean ${number(mean(list), 2)})`;
    const title =
        ranked.length > 1
            ? `${named(ranked[0], 'sharpest')}, ${named(ranked[ranked.length - 1], 'widest')}`
            : `all layers are ${ranked[0][0]}`;
    part(holder, `By place in the block: ${title}`, SEE.place);
    const list = blockOf(seen, layer).map((i) => [seen.layers[i], newest(seen, i)]);
    panels(
        holder,
        list.map(([l, h]) => ({ title: l.place, note: `${l.name}, ${number(h.tail, 2)}`, ...h, color })),
        log,
    );
    const dot = (i) => ({
        value: tails[i],
        color: depth(i / Math.max(1, tails.length - 1)),
        tip: {
            head: seen.layers[i].name,
            rows: [
                { name: 'P(|g| > σ)', value: number(tails[i]) },
                { name: seen.layers[i].structure, value: '' },
            ],
        },
    });
    dotChart(holder, {
        title: 'Every layer, by its place in the block',
        note: 'at the last look',
        xName: 'P(|g| > σ)',
        high: Math.max(0.35, ...tails),
        threshold: GAUSSIAN,
        thresholdText: 'Gaussian from 0.3',
        groups: [...places].map(([name, list]) => ({ name, dots: list.map(dot) })),
    });
}

/** The layers of the block of `layer`; of the last block where it stands outside; one of each kind without any block. */
function blockOf(seen, layer) {
    const blocks = seen.layers.map((l) => l.block),
        mine = blocks[layer] || blocks.filter((b) => b).pop();
    const kinds = seen.layers.map((l) => l.place);
    return [...blocks.keys()].filter((i) => (mine ? blocks[i] === mine : kinds.indexOf(kinds[i]) === i)).slice(0, 6);
}

function channelPictures(holder, own, looks, log) {
    const kind = (tail) => (tail > GAUSSIAN ? 'Gaussian' : 'inverted T'),
        color = (tail) => (tail > GAUSSIAN ? 'var(--c1)' : 'var(--c2)');
    const when = (look) => (look.epoch ? `after epoch ${look.epoch}` : 'before training');
    const gaussian = (look) => look.tails.filter((tail) => tail > GAUSSIAN).length;
    const counted = (look) => `${when(look)} ${gaussian(look)} of ${look.tails.length}`;
    part(holder, `By channel: ${looks.map(counted).join(', ')} channels of ${own.name} are Gaussian`, SEE.channel);
    for (const look of looks) {
        element(holder, 'h4', {}, when(look)[0].toUpperCase() + when(look).slice(1));
        panels(
            holder,
            look.pictures.map((p) => ({
                title: `channel ${p.channel}`,
                note: `${kind(p.tail)}, ${number(p.tail, 2)}`,
                ...p,
                color: color(p.tail),
            })),
            log,
        );
    }
    const grid = element(holder, 'div', { class: 'grid two' });
    for (const look of looks) {
        const shown = look.tails.length,
            sampled = shown < look.count ? ` (${shown} of ${look.count})` : '';
        figure(
            grid,
            {
                title: `Channels of ${own.name}, ${when(look)}${sampled}`,
                note: 'P(|g| > σ), highest first; Gaussian above the dashed line',
                kind: 'ranks',
            },
            (svg, width) => {
                const height = 190,
                    high = Math.max(0.35, ...looks.flatMap((l) => l.tails));
                const { x, y, area } = axes(svg, width, height, {
                    xs: [0.5, shown + 0.5],
                    ys: [0, high],
                    xName: 'channels by rank',
                    xTicks: wholeTicks(1, shown, 6),
                    yTicks: ticks(0, high, 4),
                    yText: (t) => number(t),
                });
                const wide = Math.max(1, x(2) - x(1) - (shown > 40 ? 1 : 2));
                const stops = look.tails.map((tail, i) => {
                    const box = {
                        x: x(i + 1) - wide / 2,
                        y: y(tail),
                        width: wide,
                        height: Math.max(0.5, area.bottom - y(tail)),
                    };
                    shape(svg, 'rect', { class: 'mark', ...box, fill: color(tail) });
                    return {
                        x: x(i + 1),
                        y: y(tail),
                        box,
                        tip: {
                            head: `channel ${i + 1} of ${shown} in this order`,
                            rows: [{ name: kind(tail), value: number(tail) }],
                        },
                    };
                });
                shape(svg, 'line', { class: 'threshold', x1: area.left, x2: area.right, y1: y(GAUSSIAN), y2: y(GAUSSIAN) });
                readable(svg, stops, [1, 0], area);
                return height;
            },
        );
    }
}
