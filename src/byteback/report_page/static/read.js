// SPDX-License-Identifier: Apache-2.0
// Reading the values of a chart: by mouse, finger and keyboard, all in the same way.

const tip = document.getElementById('tip');
let focused = null; // puts the tip of the chart that the keyboard reads back to its place

function showTip({ head, rows }, x, y) {
    tip.replaceChildren();
    element(tip, 'b', {}, head);
    for (const { color, name, value } of rows) {
        const row = element(tip, 'div'),
            left = element(row, 'span');
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
    let cursor = null,
        at = -1;
    const hide = () => {
        tip.hidden = true;
        cursor?.remove();
        cursor = null;
        at = -1;
    };
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
        const frame = svg.getBoundingClientRect(),
            x = event.clientX - frame.left,
            y = event.clientY - frame.top;
        let best = -1,
            least = Infinity;
        stops.forEach((stop, i) => {
            const d = weigh[0] * (stop.x - x) ** 2 + weigh[1] * (stop.y - y) ** 2;
            if (d < least) {
                least = d;
                best = i;
            }
        });
        show(best, event.clientX, event.clientY);
    };
    const step = (dx, dy) => {
        if (at < 0) return show(0);
        let best = -1,
            least = Infinity;
        stops.forEach((stop, i) => {
            const x = stop.x - stops[at].x,
                y = stop.y - stops[at].y,
                ahead = x * dx + y * dy,
                aside = Math.abs(x * dy) + Math.abs(y * dx);
            if (i !== at && ahead > 0.01 && ahead + 4 * aside < least) {
                least = ahead + 4 * aside;
                best = i;
            }
        });
        if (best >= 0) show(best);
    };
    svg.onpointermove = nearest;
    svg.onpointerdown = nearest;
    svg.onpointerleave = (event) => {
        if (event.pointerType === 'mouse') hide();
    };
    svg.onfocus = () => {
        if (svg.matches(':focus-visible')) show(0);
        focused = () => {
            if (at >= 0) show(at);
        };
    };
    svg.onblur = () => {
        hide();
        focused = null;
    };
    svg.onkeydown = (event) => {
        const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
        if (event.key === 'Escape') hide();
        if (move) {
            event.preventDefault();
            step(...move);
        }
    };
}

document.addEventListener('pointerdown', (event) => {
    if (!event.target.closest?.('figure svg')) tip.hidden = true;
});
document.addEventListener(
    'scroll',
    () => {
        if (focused) focused();
        else tip.hidden = true;
    },
    { passive: true },
);
