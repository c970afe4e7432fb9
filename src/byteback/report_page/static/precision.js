// SPDX-License-Identifier: Apache-2.0
// Precision by recall of detectors: all classes together, then each of them.

const FEW_CLASSES = 8; // all of them are drawn; of more, one is chosen
const RECALLS = Array.from({ length: 101 }, (_, i) => i / 100);
const RECALL = {
    name: 'recall',
    room: 22, // for the half of 100 % that stands beyond the axis
    ticks: () => [0, 0.2, 0.4, 0.6, 0.8, 1],
    text: (v) => percent(v, 0),
    head: (v) => `recall ${percent(v, 0)}`,
};

/** A curve up to the recall that is reached; beyond it there is no precision. */
function reached(curve) {
    const last = curve.findLastIndex((v) => v > 0);
    return curve.map((v, i) => (i <= last + 1 ? v : null));
}

function precision() {
    const { classes, members, precision: means } = group.detection;
    const holder = get('precision-charts'),
        over = get('overlap').value,
        few = classes.length <= FEW_CLASSES;
    holder.replaceChildren();
    get('class-choice').hidden = few;
    const chosen = few ? classes.map((_, i) => i + 1) : [Number(get('class').value)];
    for (const which of [0, ...chosen]) {
        const series = [];
        group.recipes.forEach((recipe, i) => {
            const own = { name: recipe.name, ...look(recipe), xs: RECALLS };
            const add = (curve, faint) => curve && series.push({ ...own, faint, ys: reached(curve) });
            if (members[i].length > 1) for (const member of members[i]) add(member.precision[over][which], true);
            add(means[i]?.[over][which], false);
        });
        const title = which ? classes[which - 1] : 'All classes';
        if (!series.length) element(holder, 'p', { class: 'note' }, `${title}: there are no such objects in the test images.`);
        else
            lineChart(holder, {
                ...{ title, series, kind: 'precision', x: RECALL, range: [0, 1], text: (v, d) => percent(v, d ? 1 : 0) },
                note: !series.some((s) => s.ys.some((v) => v > 0))
                    ? 'no box is right'
                    : `precision by recall${which ? '' : ', mean over classes'}`,
            });
    }
    for (const table of document.querySelectorAll('[data-scores]'))
        table.parentElement.hidden = Number(table.dataset.scores) !== page.groups.indexOf(group);
}

/** The sections about detections; hidden for a group that has none. */
function detections() {
    const there = group.detection;
    for (const id of ['detections', 'precision']) get(id).hidden = !there;
    if (!there) return;
    const scores = SCORES.filter((s) => s >= there.least_score);
    fill(
        get('box-score'),
        scores.map((s) => [String(s), String(s)]),
        get('box-score').value || usualScore(there, scores),
    );
    fill(
        get('box-seed'),
        there.seeds.map((s) => [String(s), String(s)]),
        get('box-seed').value,
    );
    fill(
        get('class'),
        there.classes.map((name, i) => [String(i + 1), name]),
        get('class').value,
    );
    for (const id of ['box-score', 'box-seed']) get(id).onchange = boxes;
    for (const id of ['overlap', 'class']) get(id).onchange = precision;
    boxes();
    precision();
}
