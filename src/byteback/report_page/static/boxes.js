// SPDX-License-Identifier: Apache-2.0
// What detectors found: test images with their boxes, the truth beside every recipe.

const SCORES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
const USUAL = 0.5; // the score that is chosen at first, or a lower one if that hides most of what detectors found
const COVERED = 0.5; // the overlap from which a box is correct
const CLASS_COLORS = 7;

const classColor = (label) => `var(--k${1 + ((label - 1) % CLASS_COLORS)})`;

/** Intersection over union of two boxes (x1, y1, x2, y2). */
function overlap(a, b) {
    const wide = Math.min(a[2], b[2]) - Math.max(a[0], b[0]),
        high = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
    if (wide <= 0 || high <= 0) return 0;
    const area = (box) => (box[2] - box[0]) * (box[3] - box[1]);
    return (wide * high) / (area(a) + area(b) - wide * high);
}

/** The boxes from the surest on, each with the object of its class that it covers best and no box before it took. */
function judged(truth, found) {
    const free = new Set(truth);
    return found.map((box) => {
        const near = [...free].filter((t) => t.label === box.label && !t.crowd).map((t) => [overlap(t.box, box.box), t]);
        const [best, object] = near.reduce((a, b) => (b[0] > a[0] ? b : a), [0, null]);
        if (best < COVERED) return { ...box, right: false, overlap: best };
        free.delete(object);
        return { ...box, right: true, overlap: best };
    });
}

/** Of a figure's boxes: how many objects they find, and how many boxes find none. */
const counts = (boxes) => [boxes.filter((b) => b.right).length, boxes.filter((b) => !b.right).length];

function boxes() {
    const { images, members, classes, seeds } = group.detection;
    const least = Number(get('box-score').value),
        seed = Number(get('box-seed').value);
    const shown = group.recipes
        .map((recipe, i) => ({ recipe, member: members[i].find((m) => m.seed === seed) }))
        .filter(({ member }) => member)
        .map(({ recipe, member }) => ({
            ...{ recipe, epochs: member.epochs, total: [0, 0] },
            found: member.found.map((own, i) => own && judged(images[i].truth, own.filter((b) => b.score >= least))),
        }));
    const holder = get('box-charts');
    holder.replaceChildren();
    images.forEach((image, i) => {
        element(holder, 'h3', {}, image.name);
        const row = element(holder, 'div', { class: 'pictures' }),
            objects = image.truth.filter((t) => !t.crowd).length;
        boxChart(row, { title: 'ground truth', note: `${objects} ${objects === 1 ? 'object' : 'objects'}`, image, boxes: image.truth });
        for (const { recipe, found, total } of shown.filter((s) => s.found[i])) {
            const [right, wrong] = counts(found[i]);
            total[0] += right;
            total[1] += wrong;
            boxChart(row, { title: recipe.name, note: `${right} of ${objects} found, ${wrong} wrong`, image, boxes: found[i] });
        }
    });
    const objects = images.flatMap((image) => image.truth).filter((t) => !t.crowd).length;
    const parts = shown.map(({ recipe, total: [right, wrong] }, i) =>
        i ? `${recipe.name} ${right} (${wrong})` : `${recipe.name} finds ${right} (${wrong} wrong)`,
    );
    get('detections-title').textContent = parts.length
        ? `Of ${objects} objects on these images ${parts.join(', ')}`
        : 'Detections';
    const epochs = [...new Set(shown.map((s) => s.epochs))].join(', ');
    get('detections-note').textContent =
        `${images.length} test images, the same for all, after epoch ${epochs}; seed ${seed}, boxes with a score of at least ` +
        `${least}. A solid box overlaps an object of its class by at least half (intersection over union), a dashed one ` +
        'does not, or another box of that object has a higher score.';
    get('box-seed').parentElement.hidden = seeds.length < 2;
    classLegend(images, shown, classes);
}

/** The highest score up to the usual one that leaves about as many boxes as there are objects; the lowest if none does. */
function usualScore({ images, members, seeds }, scores) {
    const first = members.map((own) => own.find((m) => m.seed === seeds[0])).filter(Boolean);
    const enough = 0.8 * first.length * images.flatMap((image) => image.truth).length;
    const left = (least) => first.flatMap((m) => m.found.flat()).filter((b) => b && b.score >= least).length;
    return scores.filter((s) => s <= USUAL && left(s) >= enough).pop() ?? scores[0];
}

/** The classes that are to be seen; the tags name them where colours do not suffice. */
function classLegend(images, shown, classes) {
    const there = new Set([...images.flatMap((i) => i.truth), ...shown.flatMap((s) => s.found.flat())].map((b) => b?.label));
    const holder = get('box-legend');
    holder.replaceChildren();
    classes.forEach((name, i) => {
        if (!there.has(i + 1)) return;
        const item = element(holder, 'span');
        element(item, 'i', { class: 'frame' }).style.borderColor = classColor(i + 1);
        item.append(name);
    });
    for (const [style, what] of [
        ['solid', 'right'],
        ['dashed', 'wrong'],
    ]) {
        const item = element(holder, 'span');
        element(item, 'i', { class: 'frame' }).style.borderStyle = style;
        item.append(what);
    }
}

/** One image with boxes {label, box, score?, right?, crowd?}; those without a score are the truth. */
function boxChart(holder, { title, note, image, boxes }) {
    const names = group.detection.classes,
        named = names.length > CLASS_COLORS;
    figure(holder, { title, note, kind: 'boxes', label: `${image.name}, ${title}: ${note}` }, (svg, width) => {
        const by = width / image.width,
            height = Math.round(image.height * by);
        shape(svg, 'image', { href: `data:image/jpeg;base64,${image.jpeg}`, width, height, preserveAspectRatio: 'none' });
        const placed = boxes.map((b) => {
            const [x, y, right, bottom] = b.box.map((v) => v * by);
            return { ...b, x, y, width: Math.max(1, right - x), height: Math.max(1, bottom - y) };
        });
        for (const b of placed) {
            const at = { x: b.x, y: b.y, width: b.width, height: b.height, rx: 2 };
            shape(svg, 'rect', { class: 'halo', ...at });
            shape(svg, 'rect', { class: `mark box${b.right === false ? ' wrong' : ''}`, ...at, stroke: classColor(b.label) });
        }
        tags(svg, placed, width, height, (b) =>
            [named ? names[b.label - 1] : '', b.score === undefined ? '' : b.score.toFixed(2)].filter(Boolean).join(' '),
        );
        const stops = placed.map((b) => ({
            x: b.x + b.width / 2,
            y: b.y + b.height / 2,
            box: { x: b.x, y: b.y, width: b.width, height: b.height, rx: 2 },
            tip: { head: names[b.label - 1] + (b.crowd ? ', many' : ''), rows: told(b) },
        }));
        readable(svg, stops, [1, 1]);
        return height;
    });
}

const told = (b) =>
    b.score === undefined
        ? [{ name: 'pixels', value: `${number(b.box[2] - b.box[0])} × ${number(b.box[3] - b.box[1])}` }]
        : [
              { name: 'score', value: b.score.toFixed(2) },
              { name: b.right ? 'overlaps its object by' : 'overlaps a free object by', value: percent(b.overlap, 0) },
          ];

/** Tags at the corners of boxes, the surest first; one that would cover another is left out: the pointer shows it. */
function tags(svg, placed, width, height, text) {
    const taken = [],
        size = width < 200 ? 8.5 : 10, // pixels of the letters: two images beside each other on a phone
        high = size + 3;
    for (const b of placed) {
        const says = text(b);
        if (!says) continue;
        const wide = (widest(svg, [says]) * size) / 12 + 6;
        // Inside the corner of a large box; a small one would vanish below its tag.
        const above = b.height < 2.4 * high || b.width < wide,
            top = !above ? b.y : b.y > high ? b.y - high : b.y + b.height;
        const x = Math.max(0, Math.min(b.x, width - wide)),
            y = Math.max(0, Math.min(top, height - high));
        if (taken.some((t) => x < t.x + t.wide + 1 && t.x < x + wide + 1 && y < t.y + high + 1 && t.y < y + high + 1)) continue;
        taken.push({ x, y, wide });
        shape(svg, 'rect', { x, y, width: wide, height: high, rx: 2, fill: classColor(b.label) });
        shape(svg, 'text', { class: 'tag', x: x + 3, y: y + size }, says).style.fontSize = `${size}px`;
    }
}
