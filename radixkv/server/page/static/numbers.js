// Numbers as people read them.

const PLAIN = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => PLAIN.format(value);

/** 1234 -> 1.2 k; three digits are enough to compare. */
export function short(value) {
  for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) {
      const scaled = value / (name === "k" ? 1e3 : size);
      return `${scaled.toFixed(scaled < 100 ? 1 : 0)} ${name}`;
    }
  }
  return PLAIN.format(value);
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;
}

/** A time in seconds, in the unit that fits. */
export function duration(seconds) {
  if (seconds < 0.9995) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const count = (value, one, many = `${one}s`) => `${whole(value)} ${value === 1 ? one : many}`;
