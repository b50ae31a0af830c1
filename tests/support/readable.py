"""What makes a page readable, measured in a browser: sizes, widths and contrasts of its text."""

SMALLEST = """
Math.min(...[...document.querySelectorAll('body *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()))
  .map(e => parseFloat(getComputedStyle(e).fontSize)))
"""
# What sticks out on the right, but for what scrolls by itself.
WIDEST = """
Math.max(...[...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll')).map(e => e.getBoundingClientRect().right))
"""
# By WCAG's formula, of every colour of text to the page's own.
CONTRAST = """
(() => {
  const numbers = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => numbers(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = e => {
    const own = getComputedStyle(e).backgroundColor;
    return numbers(own)[3] === 0 && e.parentElement ? back(e.parentElement) : own;
  };
  return Math.min(...[...document.querySelectorAll('body, body *')]
    .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()))
    .map(e => [light(getComputedStyle(e).color), light(back(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)));
})()
"""
