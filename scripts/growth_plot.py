"""Plots of growth.py: one SVG for each thing that grows, cost over size, both axes logarithmic, with a line of slope 1."""

import html
import math

WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 300, 64, 44, 76
PANEL = (WIDTH - LEFT - GAP - 16) // 2
COLOURS = ("#1f6fb2", "#c8501e", "#2a8a4a", "#8a4fa0", "#7a6a1a", "#444444")


def decades(low, high):
    return range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)


def power(exponent, unit):
    for factor, letter in ((9, "G"), (6, "M"), (3, "k")):
        if exponent >= factor:
            return f"{10 ** (exponent - factor)} {letter}{unit}"
    return f"{10.0 ** exponent:g} {unit}".strip()


class Panel:
    def __init__(self, left, sizes, costs, title, unit):
        self.left, self.title, self.unit = left, title, unit
        self.x = [math.log10(sizes[0]), math.log10(sizes[-1])]
        ticks = decades(min(costs), max(costs))
        self.y = [ticks[0], max(ticks[-1], ticks[0] + 1)]
        self.sizes = sizes

    def at(self, size, cost):
        x = self.left + (math.log10(size) - self.x[0]) / (self.x[1] - self.x[0]) * PANEL
        y = TOP + HEIGHT - (math.log10(cost) - self.y[0]) / (self.y[1] - self.y[0]) * HEIGHT
        return f"{x:.1f}", f"{y:.1f}"

    def frame(self):
        parts = [f'<rect x="{self.left}" y="{TOP}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#999"/>',
                 f'<text x="{self.left}" y="{TOP - 10}">{html.escape(self.title)}</text>']
        for exponent in range(self.y[0], self.y[1] + 1):
            _, y = self.at(self.sizes[0], 10.0 ** exponent)
            parts.append(f'<path d="M{self.left} {y}h{PANEL}" stroke="#ddd"/>')
            parts.append(f'<text x="{self.left - 6}" y="{y}" dy="4" text-anchor="end">{power(exponent, self.unit)}</text>')
        for size in self.sizes:
            x, _ = self.at(size, 10.0 ** self.y[0])
            parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{size:,}</text>')
        return parts

    def slope_one(self):
        """From the lower left, as far as it stays inside."""
        low = 10.0 ** self.y[0]
        high = min(self.sizes[-1], self.sizes[0] * 10.0 ** (self.y[1] - self.y[0]))
        (a, b), (c, d) = self.at(self.sizes[0], low), self.at(high, low * high / self.sizes[0])
        return f'<path d="M{a} {b}L{c} {d}" stroke="#888" stroke-dasharray="5 4" fill="none"/>'

    def curve(self, points, colour):
        places = [self.at(*point) for point in points]
        dots = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places)
        return f'<path d="M{"L".join(f"{x} {y}" for x, y in places)}" stroke="{colour}" fill="none" stroke-width="2"/>{dots}'


def figure(of):
    commands = of["commands"]
    work = "instructions" if all("instructions" in p for points in commands.values() for p in points) else "seconds"
    sizes = [point["size"] for point in next(iter(commands.values()))]
    titles = {"instructions": ("instructions", ""), "seconds": ("processor seconds", "s"), "memory": ("resident peak", "B")}
    parts = []
    for number, key in enumerate((work, "memory")):
        costs = [max(point[key], 1e-3) for points in commands.values() for point in points]
        panel = Panel(LEFT + number * (PANEL + GAP), sizes, costs, *titles[key])
        parts += [*panel.frame(), panel.slope_one()]
        parts += [panel.curve([(point["size"], max(point[key], 1e-3)) for point in points], colour)
                  for points, colour in zip(commands.values(), COLOURS)]
    bottom = TOP + HEIGHT + 40
    parts.append(f'<text x="{LEFT}" y="{bottom}">{html.escape(of["label"])}; dashed: slope 1</text>')
    for number, (command, colour) in enumerate(zip(commands, COLOURS)):
        x = LEFT + number * 90
        parts.append(f'<circle cx="{x + 4}" cy="{bottom + 18}" r="4" fill="{colour}"/>'
                     f'<text x="{x + 14}" y="{bottom + 22}">{html.escape(command)}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" font-family="sans-serif" '
            f'font-size="12" fill="#222"><rect width="{WIDTH}" height="{bottom + 34}" fill="#fff"/>' + "\n".join(parts)
            + "</svg>\n")


def draw(result, directory):
    directory.mkdir(parents=True, exist_ok=True)
    for axis, of in result.items():
        (directory / f"growth_{axis}.svg").write_text(figure(of))
