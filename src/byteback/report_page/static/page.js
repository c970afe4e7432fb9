// SPDX-License-Identifier: Apache-2.0
// Fills the sections of the page from its data, and again whenever a selection changes.

const page = JSON.parse(document.getElementById('data').textContent);
const get = (id) => document.getElementById(id);
const DASHES = [null, '7 4', '2 4'];
const ROLES = {
    grad_output: 'gradient of the output',
    grad_output_for_weight: "gradient of the output, copy for the weight's gradient",
    input: 'input',
    weight: 'weight',
};
let group = null;

/** float32 is grey; seven colours for the others, and then the same with dashes. */
function look(recipe) {
    const i = group.recipes.filter((r) => !r.float).indexOf(recipe);
    return recipe.float
        ? { color: 'var(--c0)', dash: null }
        : { color: `var(--c${1 + (i % 7)})`, dash: DASHES[Math.floor(i / 7) % 3] };
}

function fill(select, options, chosen) {
    select.replaceChildren();
    for (const [value, text] of options) element(select, 'option', { value }, text);
    if (chosen !== undefined && options.some(([value]) => value === String(chosen))) select.value = chosen;
}

function facts() {
    const f = group.facts,
        n = (v) => Number(v).toLocaleString('en-US');
    const seeds = new Set(group.recipes.flatMap((r) => r.seeds.map((s) => s.seed))).size;
    const size = group.score ? `of about ${f.image_size} pixels` : `of ${f.image_size}×${f.image_size} pixels`;
    get('facts').textContent = [
        `${f.network}, ${n(f.parameters)} parameters`,
        `${n(f.train_images)} images ${size}, ${n(f.test_images)} for the test`,
        `${f.epochs} epochs, batch size ${f.batch_size}`,
        `${group.recipes.length} recipes, ${seeds} ${seeds === 1 ? 'seed' : 'seeds'}`,
        `${f.threads} ${f.threads === 1 ? 'thread' : 'threads'}, kernels ${f.path}`,
    ].join(' · ');
    for (const title of document.querySelectorAll('[data-finding]')) {
        const of = page.groups.length > 1 && title.dataset.finding === 'accuracy' ? `${group.label}: ` : '';
        title.textContent = of + (group.findings[title.dataset.finding] ?? title.textContent);
    }
}

function legend() {
    for (const holder of document.querySelectorAll('[data-legend]')) {
        holder.replaceChildren();
        for (const recipe of group.recipes) {
            const { color, dash } = look(recipe),
                item = element(holder, 'span');
            const svg = shape(item, 'svg', { viewBox: '0 0 26 10', 'aria-hidden': 'true' });
            shape(svg, 'line', {
                x1: 1,
                x2: 25,
                y1: 5,
                y2: 5,
                stroke: color,
                'stroke-width': 3.5,
                ...(dash ? { 'stroke-dasharray': dash } : {}),
            });
            item.append(recipe.name);
        }
    }
}

function speed() {
    const holder = get('speed-charts');
    holder.replaceChildren();
    const rows = group.recipes.filter((r) => r.row && r.row.images_per_second);
    const bars = (value, text, ratio, what) =>
        rows
            .filter((r) => r.row[value])
            .map((r) => ({
                name: r.name,
                color: look(r).color,
                value: r.row[value],
                text: text(r.row) + (r.row[ratio] ? ` (${r.row[ratio].toFixed(2)}x)` : ''),
                tip: {
                    head: r.name,
                    rows: [
                        { name: what, value: text(r.row) },
                        ...(r.row[ratio] ? [{ name: 'float32 = 1', value: `${r.row[ratio].toFixed(2)}x` }] : []),
                    ],
                },
            }));
    if (!rows.length) return element(holder, 'p', { class: 'note' }, 'No epoch is finished yet.');
    barChart(holder, {
        title: 'Images per second',
        note: 'longer is faster',
        rows: bars('images_per_second', (r) => number(r.images_per_second), 'ratio_to_float32', 'images/s'),
    });
    const memory = bars('saved_bytes', (r) => `${(r.saved_bytes / 2 ** 20).toFixed(1)} MB`, 'saved_ratio', 'saved for backward');
    if (memory.length) barChart(holder, { title: 'Saved for the backward pass', note: 'shorter is smaller', rows: memory });
}

/** One heat map per recipe, all with the same colours. tables: [recipe, [layer][epoch]]. */
function heatMaps(id, tables, { what, note, log, low, text = number, nothing }) {
    const holder = get(id);
    holder.replaceChildren();
    if (!tables.length) element(holder, 'p', { class: 'note' }, nothing);
    const values = tables.flatMap(([, table]) => table.flat()).filter((v) => v !== null && (!log || v > 0));
    let range = log ? extent(values, [0.1, 1]) : [Math.min(low, ...values), Math.max(1, ...values)];
    if (range[0] === range[1]) range = [range[0] / 2, range[1]];
    for (const [r, table] of tables)
        heatMap(holder, {
            title: r.name,
            note,
            names: r.layers.names,
            columns: r.layers.epochs,
            values: table,
            range,
            log,
            text,
            what,
        });
}

function numerics() {
    const role = get('role').value;
    const tables = (number_, of) => group.recipes.map((r) => [r, r.layers?.roles[of]?.[number_]]).filter(([, table]) => table);
    heatMaps('deviation-charts', tables('deviation', role), {
        what: '1 − cosine',
        note: '1 − cosine, logarithmic colours',
        log: true,
        text: (v) => number(v, 2),
        nothing: 'No int8 layer has been observed yet.',
    });
    heatMaps('factor-charts', tables('learning_rate_factor', 'grad_output'), {
        what: 'learning-rate factor',
        note: '1 is the full learning rate',
        low: 0.9,
        nothing: 'Only unified-int8, and recipes made from it, do this.',
    });
    const clips = get('clip-charts');
    clips.replaceChildren();
    for (const [r, table] of tables('clip', role)) {
        const last = Math.max(1, table.length - 1);
        const series = r.layers.names.map((name, i) => ({ name, color: depth(i / last), xs: r.layers.epochs, ys: table[i] }));
        lineChart(clips, { title: r.name, note: `clip of the ${ROLES[role]}`, kind: 'clips', series, log: true });
    }
    if (!clips.childElementCount) element(clips, 'p', { class: 'note' }, 'No int8 layer has been observed yet.');
    const own = group.recipes.flatMap((r) =>
        (r.layers?.diagnostics ?? []).map((name) => [{ ...r, name: `${r.name}: ${name}` }, r.layers.roles[role]?.[name]])
    );
    const shown = own.filter(([, table]) => table);
    get('diagnostics').hidden = !shown.length;
    heatMaps('diagnostic-charts', shown, { what: 'diagnostic', note: 'by layer and epoch', low: 0, nothing: '' });
    get('first-layer').style.background = depth(0);
    get('last-layer').style.background = depth(1);
}

function pictures() {
    const holder = get('gradient-charts'),
        there = group.recipes.filter((r) => r.pictures);
    const recipe = there.find((r) => r.name === get('picture-recipe').value) ?? there[0];
    if (!recipe) {
        holder.replaceChildren();
        const why = group.score ? 'Of detectors no histograms are taken.' : 'These runs took no histograms (--histogram-every 0).';
        return element(holder, 'p', {}, why);
    }
    const names = recipe.pictures.layers.map((l) => l.name),
        before = get('picture-layer').value;
    fill(
        get('picture-layer'),
        names.map((name) => [name, name]),
        names.includes(before) ? before : names[Math.floor(names.length / 2)],
    );
    gradientPictures(
        holder,
        recipe,
        names.indexOf(get('picture-layer').value),
        get('picture-scale').value === 'log',
        look(recipe).color,
    );
}

function show(index) {
    group = page.groups[index];
    const roles = Object.keys(ROLES).filter((role) => group.recipes.some((r) => r.layers && r.layers.roles[role]));
    fill(
        get('role'),
        roles.map((role) => [role, ROLES[role]]),
        get('role').value,
    );
    const there = group.recipes.filter((r) => r.pictures);
    fill(
        get('picture-recipe'),
        there.map((r) => [r.name, r.name]),
        get('picture-recipe').value || there.find((r) => !r.float)?.name,
    );
    for (const node of [get('gradients'), document.querySelector('nav [href="#gradients"]')])
        node.hidden = Boolean(group.score) && !there.length; // detectors take no histograms
    facts();
    legend();
    if (get('detections')) detections();
    curves();
    speed();
    numerics();
    pictures();
}

fill(
    get('group'),
    page.groups.map((g, i) => [String(i), g.label]),
);
get('choice').hidden = page.groups.length < 2;
get('group').onchange = () => show(Number(get('group').value));
get('role').onchange = numerics;
for (const id of ['picture-recipe', 'picture-layer', 'picture-scale']) get(id).onchange = pictures;
dark.onchange = () => show(Number(get('group').value)); // some colours are computed
show(0);
