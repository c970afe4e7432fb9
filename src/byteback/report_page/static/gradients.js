// SPDX-License-Identifier: Apache-2.0
// The papers' pictures of gradients: sharp and wide; by epoch; by layer; by place in a block; by channel.

const GAUSSIAN = 0.3; // a channel whose share of values beyond its standard deviation is higher counts as Gaussian
const TAIL = 'share of values beyond σ';

/** Panels of histograms that share one scale of heights. list: {title, note, edge, shares, color}. */
function panels(holder, list, log) {
  const box = element(holder, 'div', { class: 'panels' });
  const top = Math.max(...list.flatMap((p) => p.shares));
  const positive = list.flatMap((p) => p.shares).filter((s) => s > 0);
  const least = 10 ** Math.floor(Math.log10(Math.min(...positive)) - 0.01);
  for (const panel of list) histogram(box, { ...panel, top, least, log });
}

/** A part of the section: a title that says what is so, and a sentence that says what to see. */
function part(holder, title, see) {
  element(holder, 'h3', {}, title);
  element(holder, 'p', {}, see);
}

/** What a histogram says in few words. */
const inWords = (h) => `P(|g| > σ) = ${number(h.tail, 2)}`;

/** All pictures of a recipe (its `pictures`), with one layer in front. */
function gradientPictures(holder, recipe, layer, log, color) {
  holder.replaceChildren();
  const seen = recipe.pictures, own = seen.layers[layer], last = seen.last[layer];
  const epochs = Object.keys(seen.histograms[layer]).map(Number);
  const final = (i) => { const all = seen.histograms[i]; return all[Math.max(...Object.keys(all).map(Number))]; };
  const gradient = final(layer), middle = (h) => h.shares[h.shares.length >> 1];

  part(holder, `Sharp and wide: ${percent(middle(gradient), 0)} of ${own.name}'s gradients lie in the middle bin of ${gradient.shares.length}, the largest is ${number(gradient.edge / gradient.std, 3)} σ away`,
    'See how sharp a spike gradients form around zero while a few lie far out, beside weights and inputs that fill their range: one scale from end to end spends most of its 8 bits on nothing.');
  panels(holder, [
    { title: 'gradient', note: inWords(gradient), ...gradient, color },
    { title: 'weight', note: 'of the same layer', ...last.weight, color: 'var(--c0)' },
    { title: 'input', note: 'of the same layer', ...last.input, color: 'var(--c0)' },
  ], log);

  const first = seen.histograms[layer][epochs[0]], moved = Math.abs(gradient.tail - first.tail) < 0.1 * first.tail ? 'stays as sharp' : gradient.tail < first.tail ? 'becomes sharper' : 'becomes less sharp';
  part(holder, epochs.length > 1
    ? `By epoch: ${own.name} ${moved}, P(|g| > σ) goes from ${number(first.tail, 2)} to ${number(gradient.tail, 2)}`
    : 'By epoch: one look so far',
    'See the range under each picture and the width of its foot: they change while the network learns, so a clip that fits once does not fit for long.');
  panels(holder, epochs.map((e) => ({ title: e ? `after epoch ${e}` : 'before training', note: inWords(seen.histograms[layer][e]), ...seen.histograms[layer][e], color })), log);

  const count = seen.layers.length, chosen = [...new Set([0, 1, 2, 3, 4, 5].map((i) => Math.round((i * (count - 1)) / 5)))];
  const tails = seen.tail.map((row) => row[row.length - 1]), known = tails.filter((t) => t !== null);
  const sharpest = tails.indexOf(Math.min(...known)), widestLayer = tails.indexOf(Math.max(...known));
  part(holder, `By layer: P(|g| > σ) lies between ${number(tails[sharpest], 2)} (${seen.layers[sharpest].name}) and ${number(tails[widestLayer], 2)} (${seen.layers[widestLayer].name})`,
    'See how layers differ at the same moment, from the first (left, top) to the last: each needs a clip of its own.');
  panels(holder, chosen.map((i) => ({ title: seen.layers[i].name, note: inWords(final(i)), ...final(i), color })), log);
  const grid = element(holder, 'div', { class: 'grid two' });
  heatMap(grid, {
    title: `${TAIL[0].toUpperCase()}${TAIL.slice(1)}`, note: '0.32 for a Gaussian; dark is sharp', names: seen.layers.map((l) => l.name), columns: seen.epochs,
    values: seen.tail, range: [0, Math.max(0.35, ...seen.tail.flat())], what: 'P(|g| > σ)',
  });
  heatMap(grid, {
    title: 'Share of Gaussian channels', note: 'channels with P(|g| > σ) above 0.3; the others are inverted T', names: seen.layers.map((l) => l.name), columns: seen.epochs,
    values: seen.gaussian, range: [0, 1], text: (v) => percent(v, 0), what: 'Gaussian channels',
  });

  structurePictures(holder, seen, layer, final, tails, log, color);
  channelPictures(holder, own, seen.channels[layer], log);
}

function structurePictures(holder, seen, layer, final, tails, log, color) {
  const places = new Map();
  seen.layers.forEach((l, i) => { if (tails[i] !== null) places.set(l.place, [...(places.get(l.place) ?? []), i]); });
  const mean = (list) => list.reduce((sum, i) => sum + tails[i], 0) / list.length;
  const common = [...places].filter(([, list]) => list.length > 1);
  const ranked = (common.length > 1 ? common : [...places]).sort((a, b) => mean(a[1]) - mean(b[1]));
  const [sharp, wide] = [ranked[0], ranked[ranked.length - 1]];
  part(holder, ranked.length > 1
    ? `By place in the block: ${sharp[0]} is the sharpest (mean ${number(mean(sharp[1]), 2)}), ${wide[0]} the widest (${number(mean(wide[1]), 2)})`
    : `By place in the block: all layers are ${sharp[0]}`,
    'See whether layers with the same place in their block stand together: what a layer is shapes its gradients as much as where it is. Dots are layers, darker ones come earlier.');
  const block = blockOf(seen, layer);
  panels(holder, block.map((i) => ({ title: seen.layers[i].place, note: `${seen.layers[i].name}, ${number(final(i).tail, 2)}`, ...final(i), color })), log);
  dotChart(holder, {
    title: 'Every layer, by its place in the block', note: 'after the last look', xName: 'P(|g| > σ)', high: Math.max(0.35, ...tails), threshold: GAUSSIAN,
    thresholdText: 'Gaussian from 0.3',
    groups: [...places].map(([name, list]) => ({
      name,
      dots: list.map((i) => ({ value: tails[i], color: depth(i / Math.max(1, tails.length - 1)), tip: { head: seen.layers[i].name, rows: [{ name: 'P(|g| > σ)', value: number(tails[i]) }, { name: seen.layers[i].structure, value: '' }] } })),
    })),
  });
}

/** The layers of the block of `layer`; of the last block where it stands outside; one of each kind without any block. */
function blockOf(seen, layer) {
  const blocks = seen.layers.map((l) => l.block), mine = blocks[layer] || blocks.filter((b) => b).pop();
  const kinds = seen.layers.map((l) => l.place);
  return [...blocks.keys()].filter((i) => (mine ? blocks[i] === mine : kinds.indexOf(kinds[i]) === i)).slice(0, 6);
}

function channelPictures(holder, own, looks, log) {
  const kind = (tail) => (tail > GAUSSIAN ? 'Gaussian' : 'inverted T'), color = (tail) => (tail > GAUSSIAN ? 'var(--c1)' : 'var(--c2)');
  const when = (look) => (look.epoch ? `after epoch ${look.epoch}` : 'before training');
  const gaussian = (look) => look.tails.filter((tail) => tail > GAUSSIAN).length;
  part(holder, `By channel: ${looks.map((look) => `${when(look)} ${gaussian(look)} of ${look.tails.length}`).join(', ')} channels of ${own.name} are Gaussian`,
    'See the two classes: bells (Gaussian, blue), and spikes on a long, thin foot (an inverted T, orange). The second paper gives each channel a scale, and each class a clip rule of its own.');
  for (const look of looks) {
    element(holder, 'h4', {}, when(look)[0].toUpperCase() + when(look).slice(1));
    panels(holder, look.pictures.map((p) => ({ title: `channel ${p.channel}`, note: `${kind(p.tail)}, ${number(p.tail, 2)}`, ...p, color: color(p.tail) })), log);
  }
  const grid = element(holder, 'div', { class: 'grid two' });
  for (const look of looks) {
    const shown = look.tails.length, sampled = shown < look.count ? ` (${shown} of ${look.count})` : '';
    figure(grid, { title: `Channels of ${own.name}, ${when(look)}${sampled}`, note: 'P(|g| > σ), highest first; Gaussian above the dashed line', kind: 'ranks' }, (svg, width) => {
      const height = 190, high = Math.max(0.35, ...looks.flatMap((l) => l.tails));
      const { x, y, area } = axes(svg, width, height, {
        xs: [0.5, shown + 0.5], ys: [0, high], xName: 'channels by rank', xTicks: wholeTicks(1, shown, 6), yTicks: ticks(0, high, 4), yText: (t) => number(t),
      });
      const wide = Math.max(1, x(2) - x(1) - (shown > 40 ? 1 : 2));
      const stops = look.tails.map((tail, i) => {
        const box = { x: x(i + 1) - wide / 2, y: y(tail), width: wide, height: Math.max(0.5, area.bottom - y(tail)) };
        shape(svg, 'rect', { class: 'mark', ...box, fill: color(tail) });
        return { x: x(i + 1), y: y(tail), box, tip: { head: `channel ${i + 1} of ${shown} in this order`, rows: [{ name: kind(tail), value: number(tail) }] } };
      });
      shape(svg, 'line', { class: 'threshold', x1: area.left, x2: area.right, y1: y(GAUSSIAN), y2: y(GAUSSIAN) });
      readable(svg, stops, [1, 0], area);
      return height;
    });
  }
}
