// SPDX-License-Identifier: Apache-2.0
// Learning curves: accuracy and loss by epoch, and the difference of int8 to float32.

function curves() {
    const holder = get('curve-charts');
    holder.replaceChildren();
    if (!group.recipes.some((r) => r.seeds.some((s) => s.epoch.length))) return begun(holder);
    const chart = (key, title, note, text) => {
        const series = [];
        for (const recipe of group.recipes) {
            const own = { name: recipe.name, ...look(recipe) };
            if (recipe.seeds.length > 1)
                for (const seed of recipe.seeds.filter((s) => s.epoch.length))
                    series.push({ ...own, faint: true, xs: seed.epoch, ys: seed[key] });
            series.push({ ...own, xs: recipe.mean.epoch, ys: recipe.mean[key] });
        }
        lineChart(holder, { title, note, series, text, log: key.endsWith('loss') });
    };
    const share = (v, digits) => percent(v, digits ? 2 : Math.abs(v * 100 - Math.round(v * 100)) > 0.01 ? 1 : 0);
    if (group.score) {
        const note = 'mean over classes and over overlaps of 50 to 95 %';
        chart('test_accuracy', `Test ${group.score}`, note, share);
        differences(holder);
        chart('AP50', 'Test AP50', 'mean over classes, overlap of 50 %', share);
        return chart('train_loss', 'Training loss', 'mean of the epoch', number);
    }
    chart('test_accuracy', 'Test accuracy', 'share of the test images', share);
    const compared = differences(holder);
    chart('test_loss', 'Test loss', 'cross-entropy', number);
    chart('train_loss', 'Training loss', 'mean of the epoch', number);
    if (!compared) chart('train_accuracy', 'Training accuracy', 'mean of the epoch', share);
}

/** Before the first epoch has ended: the loss as the steps log it. */
function begun(holder) {
    element(holder, 'p', { class: 'note' }, 'No epoch has ended yet.');
    const series = group.recipes.flatMap((r) =>
        r.seeds.map((s) => ({ name: `${r.name} seed ${s.seed}`, ...look(r), xs: s.begun.at, ys: s.begun.train_loss })),
    );
    if (series.some((s) => s.xs.length))
        lineChart(holder, { title: 'Training loss so far', note: 'mean since the last record', series });
}

/** Points with their sign: +0.37 where a value is read (digits given), as short as can be on an axis. */
const signed = (v, digits) =>
    `${v > 0.0049 ? '+' : ''}${
        digits
            ? v
                  .toFixed(2)
                  .replace(/^-0\.00$/, '0.00')
                  .replace('-', '−')
            : number(Math.abs(v) < 1e-9 ? 0 : v)
    }`;

/** Test accuracy minus float32's with the same seed. The first quarter is noise that would hide the rest. */
function differences(holder) {
    const base = group.recipes.find((r) => r.float),
        series = [],
        from = Math.ceil(group.facts.epochs / 4);
    for (const recipe of group.recipes.filter((r) => base && !r.float)) {
        const sums = new Map(),
            own = { name: recipe.name, ...look(recipe) };
        for (const seed of recipe.seeds) {
            const other = base.seeds.find((s) => s.seed === seed.seed),
                xs = [],
                ys = [];
            seed.epoch.forEach((e, i) => {
                const j = other ? other.epoch.indexOf(e) : -1;
                if (e < from || j < 0 || seed.test_accuracy[i] === null || other.test_accuracy[j] === null) return;
                xs.push(e);
                ys.push(100 * (seed.test_accuracy[i] - other.test_accuracy[j]));
                sums.set(e, [...(sums.get(e) ?? []), ys[ys.length - 1]]);
            });
            if (recipe.seeds.length > 1) series.push({ ...own, faint: true, xs, ys });
        }
        const epochs = [...sums.keys()].sort((a, b) => a - b);
        series.push({ ...own, xs: epochs, ys: epochs.map((e) => sums.get(e).reduce((a, b) => a + b) / sums.get(e).length) });
    }
    if (!series.some((s) => s.xs.length)) return false;
    lineChart(holder, {
        title: `Test ${group.score ?? 'accuracy'} above or below float32`,
        note: `points, same seed; from epoch ${from} on`,
        series,
        zero: true,
        text: signed,
    });
    return true;
}
